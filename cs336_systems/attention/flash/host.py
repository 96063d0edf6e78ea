"""What every launcher does on the host before its kernel: strides it can take, and the precision of fp32 products."""

import torch
from torch import Tensor

MAX_ROW_STRIDE = 2**23
"""Offsets inside a tile are int32, and a tile has at most 128 rows: 2^23 leaves a factor of two."""


def with_short_rows(x_BHSD: Tensor) -> Tensor:
    """``x`` if the kernels can read its strides, else a contiguous copy.

    They take any strides of batch, head and sequence, zero and overlapping ones too; columns must be neighbours.
    """
    return x_BHSD if _has_short_rows(x_BHSD) else x_BHSD.contiguous()


def writable(x_BHSD: Tensor) -> Tensor:
    """``x`` if the kernels can write its strides, else contiguous memory for its values."""
    return x_BHSD if _has_short_rows(x_BHSD) else torch.empty_like(x_BHSD, memory_format=torch.contiguous_format)


def _has_short_rows(x_BHSD: Tensor) -> bool:
    return x_BHSD.stride(-1) == 1 and x_BHSD.stride(-2) < MAX_ROW_STRIDE


def input_precision() -> str:
    """How ``tl.dot`` multiplies fp32: TF32 only where torch was told so; half-precision products do not look at it."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
