"""A table on the device of the addresses and lengths of tensors, so that one launch serves any number of them.

    table = TensorTable(chunk=8192)
    table.describe([(x.numel(), x.data_ptr()) for x in tensors], device)     # copies to the device only what changed
    kernel[(table.n_chunks,)](table.rows, table.owners, ...)                 # a program per chunk

``rows`` (n_tensors, columns) int64 holds for each tensor its number of elements, its first chunk, and the columns that
the kernel needs; ``owners`` (n_chunks,) int32 says to which row a chunk belongs. A chunk is ``chunk`` elements of one
tensor, or what its end leaves. A kernel finds its work so:

    row = rows + tl.load(owners + program) * COLUMNS          # n = row[0], first = row[1]
    start = (program - first) * CHUNK

Addresses are read from memory, so Triton does not know how they are aligned: ``aligned`` says it, and a kernel reads
whole blocks of aligned tensors in 16-byte pieces (``tl.multiple_of``), ends and others element by element.
The copy does not wait for the device, and the host does not for the copy.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cs336_systems.kernels.launching import ceil_div

ALIGNMENT_BYTES = 16
"""The widest load of a thread."""


class TensorTable:
    """A table with a row for each tensor on one device, kept there from call to call.

    Args:
        chunk: elements per program.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.n_chunks = 0
        self._described: list[tuple[int, ...]] = []
        self._device: torch.device | None = None

    def describe(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Make the table hold ``rows``: for each tensor its number of elements and the kernel's columns.

        Raises:
            RuntimeError: the rows changed while a CUDA graph is captured.
        """
        rows = list(rows)
        if rows == self._described and device == self._device:
            return
        sizes = [row[0] for row in rows]
        chunks = [ceil_div(n, self.chunk) for n in sizes]
        first = [0, *accumulate(chunks)]
        table = [(n, start, *columns) for (n, *columns), start in zip(rows, first, strict=False)]
        self.rows = to_device(torch.tensor(table, dtype=torch.int64, device="cpu"), device)
        if sizes != [row[0] for row in self._described] or device != self._device:
            owners = torch.arange(len(rows), dtype=torch.int32, device="cpu")
            counts = torch.tensor(chunks, device="cpu")
            self.owners = to_device(owners.repeat_interleave(counts, output_size=first[-1]), device)
        self.n_chunks, self._described, self._device = first[-1], rows, device


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, without waiting for it.

    Raises:
        RuntimeError: a CUDA graph is captured, which would copy at each replay from memory that is gone by then.
    """
    check_uncaptured(device)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def check_uncaptured(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph is captured, whose replays would not know what changed."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "addresses or hyperparameters changed while a CUDA graph is captured: take a step before the capture, and "
            "clear gradients in place"
        )


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every tensor begins where a thread's widest load may."""
    return all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in whatever order of its dimensions."""
    return tensor.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense(tensor)
