"""The launchers' work on the host: tensors that the copy engine can read, and the order of work."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from heapq import heapreplace

import torch
import triton
from torch import Tensor

from cs336_systems.kernels.copy_engine import ALIGNMENT_BYTES, can_be_copied

L2_BUDGET_BYTES = 32 * 1024**2
"""The most bytes that the heads of one section reread; the L2 cache has 50 MiB, in two halves."""


def has_copyable_strides(x: Tensor) -> bool:
    """Whether the copy engine can read ``x`` without a copy, apart from the alignment of its first element."""
    return can_be_copied(x.shape, x.stride(), x.dtype)


def copyable(x: Tensor) -> Tensor:
    """``x``, or a copy that the copy engine can read, with the same layout if possible, else contiguous."""
    if not has_copyable_strides(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()


def aligned(numbers: Tensor) -> Tensor:
    """The same numbers, contiguous at an address that is a multiple of 16 bytes, as kernels expect."""
    if numbers.is_contiguous() and numbers.data_ptr() % ALIGNMENT_BYTES == 0:
        return numbers
    return numbers.clone(memory_format=torch.contiguous_format)


def writable(x: Tensor) -> Tensor:
    """``x``, or contiguous memory for its values if the copy engine cannot write into ``x``."""
    if has_copyable_strides(x) and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_result(x: Tensor) -> Tensor:
    """Memory for a result of the shape of ``x``, laid out like it if the copy engine can write that."""
    if x.is_contiguous() or has_copyable_strides(x):
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def result_strides(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The strides that ``torch.empty_like`` gives for a tensor of this shape and these strides."""
    return torch.empty_like(torch.empty_strided(shape, strides, dtype=dtype, device="meta")).stride()


_ON_IT = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``x`` current in the body, as launches need it; cheap if it is current already."""
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
        torch.cuda.set_device(device)  # a new thread is on device 0, where leaving the stream would create a context
        with torch.cuda.stream(current):
            return torch.zeros(1, dtype=torch.int32, device=device)

    # In another thread: torch.compile(mode="reduce-overhead") warms up in its graphs' memory pool, where nothing may be
    # kept; only the calling thread allocates from that pool.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(make).result()


def counter(device: torch.device, stream: int) -> Tensor:
    """A 0 in int32 for ``primitives.take_item``, which a kernel leaves 0, so that it need not be written each time.

    Kernels on the current stream, which run one after another, share it. A launch captured in a graph, which may run
    concurrently, has its own, which each replay sets to 0.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of_stream(device, stream)


def section_heads(bytes_per_head: int, n_batch_heads: int) -> int:
    """The number of heads per section, so that the data that their tiles share stays in the L2 cache."""
    return min(max(L2_BUDGET_BYTES // bytes_per_head, 1), n_batch_heads)


def balanced_section(steps: Sequence[int], n_heads: int, least: int, n_programs: int) -> int:
    """The number of heads per section: of ``least``, twice that and so on, the first that is nearly the best.

    The last program then ends at most 2 % later than with the best number. At the end of a section its short tiles fill
    the time until the longest one is done, if there are enough of them.

    Args:
        steps: of each tile of a head, in the order in which programs take them.
    """
    sections = dict.fromkeys(min(least << doubling, n_heads) for doubling in range(n_heads.bit_length()))
    ends = {section: end_of_work(steps, n_heads, section, n_programs) for section in sections}
    return min(section for section, end in ends.items() if end <= 1.02 * min(ends.values()))


def end_of_work(steps: Sequence[int], n_heads: int, section: int, n_programs: int) -> int:
    """Steps until the last program is done, if each takes the next tile when it has finished one."""
    busy_until = [0] * n_programs
    for first in range(0, n_heads, section):
        for n_steps in steps:
            for _ in range(min(section, n_heads - first)):
                heapreplace(busy_until, busy_until[0] + n_steps)
    return max(busy_until)
