"""Snapshots without a GPU: written event by event, or taken from a step that really runs on the CPU."""

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.profiling import memory
from cs336_systems.profiling.memory import MARK, Label, MemoryHistory, reconstruct
from cs336_systems.training import TrainingCase, assemble, random_batch

TORCH = str(Path(torch.__file__).parent)


class EventLog:
    """A snapshot under construction, in the form of torch's allocator."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.living: dict[int, int] = {}

    def exists(self, address: int, size: int) -> None:
        """A block from before the log."""
        self.living[address] = size

    def alloc(self, address: int, size: int, frames: tuple[str, ...] = (), metadata: str = "") -> None:
        self.living[address] = size
        self.event("alloc", address, size, frames=[place(frame) for frame in frames], user_metadata=metadata)

    def free(self, address: int) -> None:
        size = self.living.pop(address)
        self.event("free_requested", address, size)
        self.event("free_completed", address, size)

    def phase(self, name: str) -> None:
        self.alloc(1, 1, metadata=MARK + name)
        self.free(1)

    def event(self, action: str, address: int, size: int, **more: Any) -> None:
        self.events.append({"action": action, "addr": address, "size": size, "stream": 0, **more})

    def history(self, labels: Sequence[Label] = ()) -> MemoryHistory:
        """The replay of this log."""
        segments = [
            {
                "address": address,
                "device": 0,
                "total_size": size,
                "blocks": [{"size": size, "requested_size": size, "state": "active_allocated", "frames": []}],
            }
            for address, size in self.living.items()
        ]
        return reconstruct({"segments": segments, "device_traces": [self.events]}, labels)


def place(text: str) -> dict[str, Any]:
    """``file:line function`` as a frame of a snapshot."""
    where, _, name = text.rpartition(" ")
    file, _, line = where.rpartition(":")
    return {"filename": file, "line": int(line), "name": name}


class WatchedStorages(TorchDispatchMode):
    """Logs the birth and death of every storage that an operation makes; its address is that of its description."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and address_of(tensor) not in self.log.living:
                self.log.alloc(address_of(tensor), tensor.untyped_storage().nbytes(), own_frames())
                weakref.finalize(tensor.untyped_storage(), self.log.free, address_of(tensor))
        return made


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def own_frames() -> tuple[str, ...]:
    """The running Python frames outside of torch and of this file, innermost first."""
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) and file != __file__:
            frames.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(frames)


def simulated_history(case: TrainingCase, mode: str) -> MemoryHistory:
    """What ``profile_memory`` would find of the second pass of ``mode``, one block for each storage."""
    log = EventLog()
    with WatchedStorages(log), patch.object(memory, "storage_address", address_of):
        step = assemble(case)
        ids, targets = random_batch(case)
        phases = step.phases(mode, ids, targets)
        for phase in phases.values():
            phase()
        log.events.clear()
        gradients: list[Label] = []
        with memory.labelled_gradients(step, gradients):
            for name, phase in phases.items():
                log.phase(name)
                phase()
        return log.history([*memory.state_labels(step, ids=ids, targets=targets), *gradients])
