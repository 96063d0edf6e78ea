"""What a command asks of its options before it runs; every fault is one sentence with the flag and the value."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cs336_systems.config import ATTENTIONS, PRECISIONS, resolve_size
from cs336_systems.training.precision import unsupported_reason

MAX_TIMEOUT_S = 1e6


def check_given(options: Any, *names: str) -> None:
    """Raise ValueError if one of these options, each a set of values, is empty."""
    for name in names:
        if not getattr(options, name):
            raise ValueError(f"{_flag(name)} needs at least one value, got none")


def check_positive(options: Any, *names: str) -> None:
    """Raise ValueError unless these options, each a number or a set of numbers, are above zero."""
    for name in names:
        if bad := [value for value in _values(options, name) if not value > 0]:
            raise ValueError(f"{_flag(name)} must be positive, got {bad[0]:g}")


def check_not_negative(options: Any, *names: str) -> None:
    """Raise ValueError if one of these options, each a number or a set of numbers, is below zero."""
    for name in names:
        if bad := [value for value in _values(options, name) if not value >= 0]:
            raise ValueError(f"{_flag(name)} must not be negative, got {bad[0]:g}")


def check_seed(seed: int, bits: int = 63) -> None:
    """Raise ValueError unless ``--seed`` fits into so many bits."""
    if not 0 <= seed < 2**bits:
        raise ValueError(f"--seed must lie in 0..2^{bits}-1, got {seed}")


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError unless ``--timeout`` is a number of seconds that an operating system can wait."""
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"--timeout must be positive and at most {MAX_TIMEOUT_S:g} seconds, got {timeout_s:g}")


def check_dtypes(dtypes: Sequence[str], device: str) -> None:
    """Raise ValueError if the device cannot compute in one of these precisions."""
    for dtype in dtypes:
        if reason := unsupported_reason(PRECISIONS[dtype], torch.device(device)):
            raise ValueError(f"--dtype {dtype}: {reason}")


def check_attention(names: Sequence[str]) -> None:
    """Raise ValueError if one of ``--attention`` is unknown."""
    for name in names:
        if name not in ATTENTIONS:
            raise ValueError(f"--attention {name}: known are {', '.join(ATTENTIONS)}")


def resolved_sizes(sizes: Sequence[str], context_lengths: Sequence[int]) -> list[str]:
    """The names that ``--size`` means.

    Raises:
        ValueError: a size is unknown, or a context is longer than a model's.
    """
    names = [resolve_size(size).name for size in sizes]
    for name, context_length in itertools.product(names, context_lengths):
        resolve_size(name).at_context(context_length)
    return names


def small_defaults_note(options: Any, default_options: Callable[[str], Any], *names: str) -> str:
    """A sentence on which of these options stand at the smaller defaults of a machine without a GPU; "" if none do."""
    if options.device != "cpu":
        return ""
    small, usual = default_options("cpu"), default_options("cuda")
    shrunk = [name for name in names if getattr(options, name) == getattr(small, name)]
    if not shrunk:
        return ""
    here = ", ".join(f"{_flag(name)} {_shown(getattr(small, name))}" for name in shrunk)
    return f"On a CPU the defaults shrink: {here} (on a GPU {', '.join(_shown(getattr(usual, n)) for n in shrunk)})."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _values(options: Any, name: str) -> tuple[Any, ...]:
    value = getattr(options, name)
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
