"""A streamed step on nsys's time line: its three streams have names, and every operation is in a range of its kind.

    step = StreamedStep(..., lanes=RangedStreams(device))
    with ranged(STEP):
        step(token_ids, targets)

Streams are named after their lanes, ``in``, ``compute`` and ``out``. Ranges are named after operations, such as ``fetch
weights``, ``forward`` and ``backward`` (``streaming/schedule.py``), and hold one that names layer, round and chunk.
"""

import ctypes
from collections.abc import Mapping

import torch

from cs336_systems.profiling.ranges import ranged
from cs336_systems.streaming.lanes import Compute, Copy, Streams
from cs336_systems.streaming.schedule import Lane, Operation

_NVTX = "libnvtx3interop.so.1"
"""The library that torch has loaded; the ``nvtx`` package cannot name streams."""


class RangedStreams(Streams):
    """Streams whose operations are in ranges."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        super().__init__(device, timed=timed)
        copies = {str(lane): stream for lane, stream in self.copies.items()}
        name_streams({str(Lane.COMPUTE): torch.cuda.current_stream(device)} | copies)

    def enqueue(self, operation: Operation, stream: torch.cuda.Stream, compute: Compute, copy: Copy) -> None:
        with ranged(kind_of(operation)), ranged(place_of(operation)):
            super().enqueue(operation, stream, compute, copy)


def kind_of(operation: Operation) -> str:
    """What the operation does, with the item that a copy moves."""
    if operation.lane is Lane.COMPUTE:
        return str(operation.kind)
    (held,) = operation.writes or operation.reads
    return f"{operation.kind} {held.item.what}"


def place_of(operation: Operation) -> str:
    """The layer, round and chunk of the operation."""
    return f"layer {operation.layer}, round {operation.round}, chunk {operation.chunk}"


def name_streams(streams: Mapping[str, torch.cuda.Stream]) -> None:
    """Give streams names in what nsys records; nothing where NVTX is not installed."""
    try:
        library = ctypes.CDLL(_NVTX)
    except OSError:
        return
    for name, stream in streams.items():
        library.nvtxNameCudaStreamA(ctypes.c_void_p(stream.cuda_stream), name.encode())
