"""A CUDA driver that is imagined: its stream of copies is a thread of this process, and the caller computes.

Ranks are processes that have mapped each other's memory; addresses are real, and so are flags.
"""

import ctypes
import itertools
import queue
import random
import threading
import time
from collections import Counter

import torch

from cs336_systems.distributed.copy_stream import CopyStream, _MemoryOperation
from cs336_systems.distributed.tensor_travel import _Mapped

COMPUTES = 7
"""The handle of the caller's stream, which has done what it was given when it gives something else."""
PATIENCE_S = 120
"""Seconds after which something is held to be waited for in vain."""


class ImaginedDriver:
    """Counts its calls by name; between operations of its stream there are pauses, of a seed."""

    def __init__(self, seed: int) -> None:
        self.calls: Counter[str] = Counter()
        self._random, self._numbers = random.Random(seed), itertools.count(1)
        self._recorded: dict[int, threading.Event] = {}
        self._given: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            operation = self._given.get()
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * 2e-3)
            operation()

    def _give(self, name, stream, operation) -> int:
        self.calls[name] += 1
        if stream == COMPUTES:
            operation()
        else:
            self._given.put(operation)
        return 0

    def cuCtxSynchronize(self) -> int:
        done = threading.Event()
        self._given.put(done.set)
        assert done.wait(PATIENCE_S)
        return 0

    def cuMemcpyAsync(self, into, source, n_bytes, stream) -> int:
        return self._give("copy", stream, lambda: ctypes.memmove(into, source, n_bytes))

    def cuStreamBatchMemOp_v2(self, stream, count, place, flags) -> int:
        operations = [
            (each.operation, each.address, each.value) for each in (_MemoryOperation * count).from_address(place)
        ]
        assert flags == 0 and {operation for operation, *_ in operations} <= {1, 2}
        self.calls["flags"] += count
        return self._give("batches of flags", stream, lambda: self._flags(operations))

    def _flags(self, operations) -> None:
        for operation, address, value in operations:
            flag, until = ctypes.c_int32.from_address(address), time.monotonic() + PATIENCE_S
            if operation == 2:
                flag.value = value
            while flag.value < value:
                assert time.monotonic() < until, "a flag that nobody raises"
                time.sleep(1e-5)

    def cuEventCreate(self, place, flags) -> int:
        ctypes.c_uint64.from_address(place).value = next(self._numbers)
        self.calls["events made"] += 1
        return 0

    def cuEventRecord(self, event, stream) -> int:
        self._recorded[event] = recorded = threading.Event()
        return self._give("records", stream, recorded.set)

    def cuStreamWaitEvent(self, stream, event, flags) -> int:
        recorded = self._recorded[event]  # as it is now: it may be recorded again

        def wait() -> None:
            assert recorded.wait(PATIENCE_S)

        return self._give("waits", stream, wait)


def imagined_stream(driver: ImaginedDriver) -> CopyStream:
    return CopyStream(torch.device("cpu"), driver, lambda: COMPUTES)


class Imagined(_Mapped):
    """The exchanges of GPUs, between ranks of CPUs."""

    def _make_stream(self) -> CopyStream:
        self.driver = ImaginedDriver(self._rank)
        return imagined_stream(self.driver)
