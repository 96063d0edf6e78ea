"""Tensors as Hopper's copy engine sees them, and descriptors of them.

A descriptor says where a tensor lies, in up to five dimensions with strides of whole 16 bytes, and which box of it one
copy moves. Boxes that reach past an end are filled with zeros on the way in and cut on the way out: no kernel checks
rows or columns of what is copied so.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNMENT_BYTES = 16
"""Of the first element and of every stride but the last."""
MAX_STRIDE_BYTES = 2**40

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def can_be_copied(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the copy engine can read an aligned tensor so laid out."""
    step = ALIGNMENT_BYTES // dtype.itemsize
    limit = MAX_STRIDE_BYTES // dtype.itemsize
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size != 1 and (stride <= 0 or stride % step or stride >= limit):
            return False
    return strides[-1] == 1


def example(dtype: torch.dtype) -> Tensor:
    """Stands for aligned memory of that type where a launch is prepared."""
    return torch.empty(0, dtype=dtype, device="meta")


def descriptor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]
) -> TensorDescriptor:
    """How the copy engine moves boxes of a tensor, two- or four-dimensional, to and from swizzled shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _ELEMENT[dtype])
    # The stride of a dimension of one is never used, but must be aligned.
    used = [stride if size > 1 else ALIGNMENT_BYTES for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    return TensorDescriptor(example(dtype), list(shape), [*used, 1], list(box), layout)
