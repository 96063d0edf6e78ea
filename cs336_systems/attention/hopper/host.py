"""What the launchers do on the host: tensors that the copy engine can read, their descriptors, the order of work.

A descriptor says where a tensor lies, in up to five dimensions with strides of whole 16 bytes, and which box of it one
copy moves. Boxes that reach past an end are filled with zeros on the way in and cut on the way out: no kernel checks
rows or columns of what is copied so.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNMENT_BYTES = 16
"""Of the first element and of every stride but the last."""
MAX_STRIDE_BYTES = 2**40

L2_BUDGET_BYTES = 32 * 1024**2
"""What the heads of one section may read again and again; the L2 cache has 50 MiB, in two halves."""

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def has_copyable_strides(x: Tensor) -> bool:
    """Whether the copy engine can read ``x`` where it lies, but for the alignment of its first element."""
    *strides, last = x.stride()
    if last != 1:
        return False
    step = ALIGNMENT_BYTES // x.element_size()
    limit = MAX_STRIDE_BYTES // x.element_size()
    for size, stride in zip(x.shape, strides, strict=False):
        if size != 1 and (stride <= 0 or stride % step or stride >= limit):
            return False
    return True


def copyable(x: Tensor) -> Tensor:
    """``x``, or a contiguous copy if the copy engine cannot read it where it lies."""
    if has_copyable_strides(x) and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def empty_result(x: Tensor) -> Tensor:
    """Memory for a result of the shape of ``x``, laid out like it if the copy engine can write that."""
    return (
        torch.empty_like(x) if has_copyable_strides(x) else torch.empty_like(x, memory_format=torch.contiguous_format)
    )


@lru_cache(maxsize=1024)
def _checked_fields(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]
) -> dict[str, Any]:
    """The fields of a descriptor but for its memory; to check them takes as long as a short kernel."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _ELEMENT[dtype])
    # The stride of a dimension of one is never used, but must be aligned.
    used = [stride if size > 1 else ALIGNMENT_BYTES for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), [*used, 1], list(box), layout))


def descriptor(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """How the copy engine moves boxes of ``x``, two- or four-dimensional, to and from swizzled shared memory."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(_checked_fields(x.shape, x.stride(), x.dtype, box), base=x)
    return made


@cache
def _counter_of_stream(device: torch.device, stream: int) -> Tensor:
    current = torch.cuda.current_stream(device)

    def make() -> Tensor:
        with torch.cuda.stream(current):
            return torch.zeros(1, dtype=torch.int32, device=device)

    # In another thread: torch.compile(mode="reduce-overhead") warms up with the memory of its graphs, in which nothing
    # may be kept, and that memory serves the calling thread only.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(make).result()


def counter(device: torch.device) -> Tensor:
    """A 0 in int32 for ``primitives.take_item``, which a kernel leaves 0, so that it need not be written each time.

    Kernels of one stream, which run one after another, share it. A launch that a graph captures, and that may run
    beside them, has its own, which each replay sets to 0.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of_stream(device, torch.cuda.current_stream(device).cuda_stream)


def section_heads(bytes_per_head: int, n_batch_heads: int) -> int:
    """How many heads to work on at a time, so that what their tiles share stays in the L2 cache."""
    return min(max(L2_BUDGET_BYTES // bytes_per_head, 1), n_batch_heads)
