"""Checks that every kernel's public function makes before a launch."""

from typing import Any

import torch
from torch import Tensor

from cs336_systems.operators.launching import needs_other_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_runnable(kernel: Any, x: Tensor) -> None:
    """Whether ``kernel`` takes the dtype and device of ``x``.

    Raises:
        ValueError: another dtype than fp32, bf16 or fp16, or no CUDA tensor where kernels are compiled.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"the kernel takes float32, bfloat16 and float16, got {x.dtype}")
    check_device(kernel, x)


def check_device(kernel: Any, x: Tensor) -> None:
    """Raises ValueError unless ``x`` is a CUDA tensor, where kernels are compiled."""
    if needs_other_device(kernel, x.device):
        raise ValueError(
            f"the kernel needs a CUDA device (or TRITON_INTERPRET=1 before it is imported), got a tensor on {x.device}"
        )


def check_alike(**tensors: Tensor) -> None:
    """Raises ValueError unless all tensors, given by name, share one dtype and one device."""
    if len({(x.dtype, x.device) for x in tensors.values()}) > 1:
        got = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"dtype and device must be shared, got {got}")
