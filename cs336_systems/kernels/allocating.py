"""Launchers that allocate and do not compute, for predictions of memory.

``training/dry_run.py`` follows a step on ``meta``, where tensors have shapes and no bytes. Inside ``only_allocating``
our launchers allocate what they do on an H200, whatever the device of their tensors, and launch nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload

FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {}
"""The function behind each operator that ``launching.operator`` has registered."""

_computes = True
_on_host: Callable[[torch.Tensor], None] | None = None


@contextmanager
def only_allocating(on_host: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, nothing is launched.

    Args:
        on_host: hears of each tensor that would be in host memory; it is on ``meta``, too.
    """
    global _computes, _on_host
    before = _computes, _on_host
    _computes, _on_host = False, on_host
    try:
        yield
    finally:
        _computes, _on_host = before


def computes() -> bool:
    """Whether kernels run and tensors have values, as everywhere but in ``only_allocating``."""
    return _computes


def imagined_on_host(n_bytes: int) -> torch.Tensor:
    """Inside ``only_allocating``, (n_bytes,) uint8 that stands for host memory."""
    assert _on_host is not None
    memory = torch.empty(n_bytes, dtype=torch.uint8, device="meta")
    _on_host(memory)
    return memory
