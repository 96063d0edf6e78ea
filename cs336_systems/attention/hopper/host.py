"""What the launchers do on the host: tensors that the copy engine can read, their descriptors, the order of work.

A descriptor says where a tensor lies, in up to five dimensions with strides of whole 16 bytes, and which box of it one
copy moves. Boxes that reach past an end are filled with zeros on the way in and cut on the way out: no kernel checks
rows or columns of what is copied so.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
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
    return can_be_copied(x.shape, x.stride(), x.dtype)


def can_be_copied(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the copy engine can read an aligned tensor so laid out."""
    step = ALIGNMENT_BYTES // dtype.itemsize
    limit = MAX_STRIDE_BYTES // dtype.itemsize
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size != 1 and (stride <= 0 or stride % step or stride >= limit):
            return False
    return strides[-1] == 1


def copyable(x: Tensor) -> Tensor:
    """``x``, or a copy if the copy engine cannot read it where it lies: laid out like it, or contiguous."""
    if not has_copyable_strides(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()


def writable(x: Tensor) -> Tensor:
    """``x``, or contiguous memory for its values if the copy engine cannot write them where they lie."""
    if has_copyable_strides(x) and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_result(x: Tensor) -> Tensor:
    """Memory for a result of the shape of ``x``, laid out like it if the copy engine can write that."""
    if x.is_contiguous() or has_copyable_strides(x):
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def result_strides(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Of ``torch.empty_like`` of a tensor so laid out."""
    return torch.empty_like(torch.empty_strided(shape, strides, dtype=dtype, device="meta")).stride()


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


_ON_IT = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Inside, the device of ``x`` is the current one, as launches need it; where it is already, this costs little."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _ON_IT
    return torch.cuda.device_of(x)


def current_stream(device: torch.device) -> int:
    """The handle of the stream on which kernels are launched."""
    handle: int = triton.runtime.driver.active.get_current_stream(device.index)
    return handle


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


def counter(device: torch.device, stream: int) -> Tensor:
    """A 0 in int32 for ``primitives.take_item``, which a kernel leaves 0, so that it need not be written each time.

    Kernels of one stream, the current one, which run one after another, share it. A launch that a graph captures, and
    that may run beside them, has its own, which each replay sets to 0.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of_stream(device, stream)


def section_heads(bytes_per_head: int, n_batch_heads: int) -> int:
    """How many heads to work on at a time, so that what their tiles share stays in the L2 cache."""
    return min(max(L2_BUDGET_BYTES // bytes_per_head, 1), n_batch_heads)
