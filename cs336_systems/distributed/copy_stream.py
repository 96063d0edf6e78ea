"""A stream of copies and flags that overlaps with matmuls, by few calls of the CUDA driver and without kernels.

Ranks have mapped each other's memory. A flag is a number in it: one rank's stream writes the number when its work so
far is done, and another rank's stream waits for it (``cuStreamBatchMemOp``; a kernel could not start until a matmul
frees a multiprocessor). Consecutive writes and waits take one call.

Torch's calls do the same with more work on the host: they change the current stream and make new events. See "Stream
Memory Operations" and "Event Management" in the CUDA Driver API.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Wait = Callable[[], None]

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_AT_LEAST, _AFTER_ALL_BEFORE = 0, 0
"""The driver's flags for a wait, until at least the number, and for a write, which follows a memory barrier."""
_NON_BLOCKING = 1
"""The driver's flag for a stream that does not wait for the default stream."""
_NO_TIMING = 2
"""The driver's flag for an event that records no time."""
_SUCCESS = 0

MAX_BATCH = 16
"""The most memory operations in a call: one write and one wait for each of eight GPUs."""


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
    """The driver, with the argument types of the functions that are called here."""
    library, place, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64, ctypes.c_size_t
    library.cuMemcpyAsync.argtypes = place, place, size, place
    library.cuStreamBatchMemOp_v2.argtypes = place, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
    library.cuStreamCreate.argtypes = ctypes.c_void_p, ctypes.c_uint
    library.cuEventCreate.argtypes = ctypes.c_void_p, ctypes.c_uint
    library.cuEventRecord.argtypes = place, place
    library.cuStreamWaitEvent.argtypes = place, place, ctypes.c_uint
    return library


def _check(name: str, result: int) -> None:
    if result != _SUCCESS:
        raise RuntimeError(f"{name} failed with CUDA error {result}")


def unshared_stream() -> torch.cuda.ExternalStream:
    """Make a stream of the current CUDA device that nobody else uses and that waits for no other stream.

    ``torch.cuda.Stream`` takes its streams round-robin from a pool of 32, which collectives' callbacks use, too: a
    callback that waits for a collective delays all other work on the same stream.

    Raises:
        RuntimeError: a call of the driver fails.
    """
    torch.cuda.current_stream()  # the device's context exists from here on
    handle = ctypes.c_void_p()
    _check("cuStreamCreate", _library().cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING))
    return torch.cuda.ExternalStream(handle.value)


class CopyStream:
    """A stream of a CUDA device that runs copies and flags in order; memory is given by integer addresses.

    Raises:
        RuntimeError: from every method, if a call of the driver fails.
    """

    def __init__(self, device: torch.device, library: Any = None, current: Callable[[], int] | None = None) -> None:
        """
        Args:
            library: replaces this machine's driver in tests.
            current: returns the handle of the stream that computes; torch's current one if None.
        """
        self._library = library or _library()
        if current is None:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._stream = torch.cuda.Stream(index, priority=-1)  # kept alive, as its handle is used
            self._handle = self._stream.cuda_stream
            current = lambda: int(torch._C._cuda_getCurrentRawStream(index))  # noqa: E731
        else:
            self._handle = -1
        self._current = current
        self._batch = (_MemoryOperation * MAX_BATCH)()
        self._place, self._n_batched = ctypes.addressof(self._batch), 0
        self._idle_events: list[int] = []
        """Events whose waits have been enqueued, so they may be reused."""

    def synchronize(self) -> None:
        """Make the host wait for all streams of the device."""
        self.flush()
        _check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    def copy(self, into: int, source: int, n_bytes: int) -> None:
        """Copy bytes from one address to another."""
        self.flush()
        _check("cuMemcpyAsync", self._library.cuMemcpyAsync(into, source, n_bytes, self._handle))

    def raise_flag(self, address: int, number: int) -> None:
        """Write a number when this stream's work so far is done; ``flush`` or a later call enqueues it."""
        self._add(_WRITE_VALUE_32, address, number, _AFTER_ALL_BEFORE)

    def await_flag(self, address: int, number: int) -> None:
        """Make this stream wait until the flag is at least this number; enqueued as ``raise_flag`` is."""
        self._add(_WAIT_VALUE_32, address, number, _AT_LEAST)

    def _add(self, operation: int, address: int, number: int, flags: int) -> None:
        if self._n_batched == MAX_BATCH:
            self.flush()
        each = self._batch[self._n_batched]
        each.operation, each.address, each.value, each.flags = operation, address, number, flags
        self._n_batched += 1

    def flush(self) -> None:
        """Enqueue the flag operations that are batched so far."""
        if self._n_batched:
            n, self._n_batched = self._n_batched, 0
            result = self._library.cuStreamBatchMemOp_v2(self._handle, n, self._place, 0)
            _check("cuStreamBatchMemOp", result)

    def follow(self) -> None:
        """Make this stream wait for the current stream's work so far."""
        self.flush()
        event = self._record(self._current())
        _check("cuStreamWaitEvent", self._library.cuStreamWaitEvent(self._handle, event, 0))
        self._idle_events.append(event)

    def reached(self) -> Wait:
        """Return a function that makes the current stream wait for this stream's work so far.

        Only its first call has an effect, so call it on one stream.
        """
        self.flush()
        events = [self._record(self._handle)]

        def wait() -> None:
            if events:
                event = events.pop()
                _check("cuStreamWaitEvent", self._library.cuStreamWaitEvent(self._current(), event, 0))
                self._idle_events.append(event)

        return wait

    def _record(self, stream: int) -> int:
        event = self._idle_events.pop() if self._idle_events else self._make_event()
        _check("cuEventRecord", self._library.cuEventRecord(event, stream))
        return event

    def _make_event(self) -> int:
        event = ctypes.c_uint64()
        _check("cuEventCreate", self._library.cuEventCreate(ctypes.addressof(event), _NO_TIMING))
        return int(event.value)
