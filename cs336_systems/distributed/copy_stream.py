"""A stream of copies and flags beside the products, by the driver: few calls of the host, and no kernel.

Between ranks that have mapped each other's memory, a flag is a number that a stream raises when what it copied or
computed before is there, and for which a stream of the other rank waits (``cuStreamBatchMemOp``; a kernel could not
start until a product frees a multiprocessor). Flags that are raised and awaited in a row take one call.

Torch's own calls do the same, but go through a change of the current stream and new events, and so take the host
several times as long, which short sequences wait for. CUDA Driver API, sections "Stream Memory Operations" and "Event
Management".
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Wait = Callable[[], None]

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_AT_LEAST, _AFTER_ALL_BEFORE = 0, 0
"""Flags of a wait, which ends when the number is there or a higher one, and of a write, which has a barrier before."""
_NO_TIMING = 2
_SUCCESS = 0

MAX_BATCH = 16
"""Memory operations in a call: more than a host has GPUs, twice."""


class _MemoryOperation(ctypes.Structure):
    """``CUstreamBatchMemOpParams`` of a wait or a write of 32 bits."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


@cache
def _library() -> Any:
    """The driver, with the types of what is called here."""
    library, place, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64, ctypes.c_size_t
    library.cuMemcpyAsync.argtypes = place, place, size, place
    library.cuStreamBatchMemOp_v2.argtypes = place, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    library.cuEventCreate.argtypes = ctypes.c_void_p, ctypes.c_uint
    library.cuEventRecord.argtypes = place, place
    library.cuStreamWaitEvent.argtypes = place, place, ctypes.c_uint
    return library


class CopyStream:
    """A stream of a CUDA device, on which copies and flags go in order; addresses are numbers.

    Raises:
        RuntimeError: in every method, a call of the driver failed.
    """

    def __init__(self, device: torch.device, library: Any = None, current: Callable[[], int] | None = None) -> None:
        """
        Args:
            library: the driver, if not this machine's.
            current: gives the handle of the stream that computes, if not torch's current one.
        """
        self._library = library or _library()
        if current is None:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._stream = torch.cuda.Stream(index, priority=-1)  # kept, as its handle is used
            self._handle = self._stream.cuda_stream
            current = lambda: int(torch._C._cuda_getCurrentRawStream(index))  # noqa: E731
        else:
            self._handle = -1
        self._current = current
        self._batch = (_MemoryOperation * MAX_BATCH)()
        self._place, self._n_batched = ctypes.addressof(self._batch), 0
        self._idle_events: list[int] = []
        """Events for which whoever had to wait for them does: they may be recorded again."""

    def synchronize(self) -> None:
        """The host waits for all that the device was given, on every stream."""
        self.flush()
        self._check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    def copy(self, into: int, source: int, n_bytes: int) -> None:
        self.flush()
        self._check("cuMemcpyAsync", self._library.cuMemcpyAsync(into, source, n_bytes, self._handle))

    def raise_flag(self, address: int, number: int) -> None:
        """Write a number when what was given to this stream before is done; ``flush`` must follow."""
        self._add(_WRITE_VALUE_32, address, number, _AFTER_ALL_BEFORE)

    def await_flag(self, address: int, number: int) -> None:
        """Go on when the number is there, or a higher one; ``flush`` must follow."""
        self._add(_WAIT_VALUE_32, address, number, _AT_LEAST)

    def _add(self, operation: int, address: int, number: int, flags: int) -> None:
        if self._n_batched == MAX_BATCH:
            self.flush()
        each = self._batch[self._n_batched]
        each.operation, each.address, each.value, each.flags = operation, address, number, flags
        self._n_batched += 1

    def flush(self) -> None:
        """Give the device the flags that it has not been given yet."""
        if self._n_batched:
            n, self._n_batched = self._n_batched, 0
            result = self._library.cuStreamBatchMemOp_v2(self._handle, n, self._place, 0)
            self._check("cuStreamBatchMemOp", result)

    def follow(self) -> None:
        """Go on when what the current stream has been given is done."""
        self.flush()
        event = self._record(self._current())
        self._check("cuStreamWaitEvent", self._library.cuStreamWaitEvent(self._handle, event, 0))
        self._idle_events.append(event)

    def reached(self) -> Wait:
        """A function by which the current stream waits for what this stream has been given by now.

        It does so once: a second call, on the same current stream, has nothing to wait for.
        """
        self.flush()
        events = [self._record(self._handle)]

        def wait() -> None:
            if events:
                event = events.pop()
                self._check("cuStreamWaitEvent", self._library.cuStreamWaitEvent(self._current(), event, 0))
                self._idle_events.append(event)

        return wait

    def _record(self, stream: int) -> int:
        event = self._idle_events.pop() if self._idle_events else self._make_event()
        self._check("cuEventRecord", self._library.cuEventRecord(event, stream))
        return event

    def _make_event(self) -> int:
        event = ctypes.c_uint64()
        self._check("cuEventCreate", self._library.cuEventCreate(ctypes.addressof(event), _NO_TIMING))
        return int(event.value)

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result != _SUCCESS:
            raise RuntimeError(f"{name} failed with CUDA error {result}")
