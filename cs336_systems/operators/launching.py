"""Launching Triton kernels at little cost to the host, which for short sequences is what limits attention.

Triton compiles a kernel for each set of constants, dtypes, alignments and divisors of its arguments, and goes through
all of them at each launch to find the form that fits. ``launch`` remembers the form by a finer key that is quicker to
make. It stands for ``kernel[grid](*arguments, **constants_and_options)``:

    launch(kernel, grid, *arguments, **constants_and_options)

Not for all of it: Triton's own settings (``triton.knobs``) and the globals that a kernel reads must not change after
its first launch, and its hooks before a run are not called.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

MAX_REMEMBERED = 4096
"""Keys hold sequence lengths: who meets more of them starts over."""

_ALIGNMENT_BYTES = 16
_remembered: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up; ``triton.cdiv`` is made for compilers and takes microseconds."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n > 0; ``triton.next_power_of_2`` is as slow as ``triton.cdiv``."""
    return 1 << (n - 1).bit_length()


@cache
def n_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def needs_other_device(kernel: Any, device: torch.device) -> bool:
    """Whether ``kernel`` cannot run there: off CUDA devices Triton can only interpret, if told so in time."""
    return device.type != "cuda" and isinstance(kernel, triton.JITFunction)


def launch(kernel: Any, grid: tuple[int], *arguments: Any, **constants_and_options: Any) -> None:
    """Run ``kernel`` on the current device and stream.

    Args:
        kernel: of ``triton.jit`` or ``gluon.jit``; where Triton interprets kernels, nothing is remembered.
        grid: how many programs.
        arguments: tensors, their descriptors, ints and floats (no bools), for the first parameters in order.
        constants_and_options: by name, the other parameters, all ``constexpr``, and what the compiler takes.
    """
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*arguments, **constants_and_options)
        return
    key = (
        kernel,
        triton.runtime.driver.active.get_current_device(),
        tuple(map(_what_matters, arguments)),
        tuple(constants_and_options.items()),
    )
    if found := _remembered.get(key):
        compiled, constants = found
        compiled[(*grid, 1, 1)](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, **constants_and_options)
    constants = tuple(constants_and_options[name] for name in kernel.arg_names[len(arguments) :])
    if len(_remembered) >= MAX_REMEMBERED:
        _remembered.clear()
    _remembered[key] = compiled, constants


def _what_matters(argument: Any) -> Hashable:
    """Of an argument, no less than Triton looks at."""
    if type(argument) is int:
        return argument
    if isinstance(argument, float):
        return float
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT_BYTES == 0
    return argument.base.dtype, argument.layout, *argument.block_shape
