"""Snapshots without a GPU: written event by event, or taken from a step that really runs on the CPU."""

import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.profiling import memory_profile
from cs336_systems.profiling.memory_history import MARK, Snapshot
from cs336_systems.training import TrainingCase, assemble, random_batch

US_PER_EVENT = 1000
TORCH = str(Path(torch.__file__).parent)


class EventLog:
    """A snapshot under construction, in the form of torch's allocator; one event takes one millisecond."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.living: dict[int, int] = {}
        self.metadata = ""

    def exists(self, address: int, size: int) -> None:
        """A block from before the log."""
        self.living[address] = size

    def alloc(self, address: int, size: int, frames: tuple[str, ...] = ()) -> None:
        self.living[address] = size
        self._event("alloc", address, size, frames=[place(frame) for frame in frames], user_metadata=self.metadata)

    def free(self, address: int) -> None:
        size = self.living.pop(address)
        self._event("free_requested", address, size)
        self._event("free_completed", address, size)

    def phase(self, name: str) -> None:
        before, self.metadata = self.metadata, MARK + name
        self.alloc(1, 1)
        self.metadata = before
        self.free(1)

    def _event(self, action: str, address: int, size: int, **more: Any) -> None:
        time_us = US_PER_EVENT * len(self.events)
        self.events.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, **more})

    def snapshot(self, labels: list[list[Any]] | None = None) -> Snapshot:
        segments = [
            {
                "address": address,
                "device": 0,
                "total_size": size,
                "blocks": [{"size": size, "requested_size": size, "state": "active_allocated", "frames": []}],
            }
            for address, size in self.living.items()
        ]
        return {"segments": segments, "device_traces": [list(self.events)], "labels": labels or []}


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


def simulated_snapshot(case: TrainingCase, mode: str) -> Snapshot:
    """What ``profile_memory`` would record of the second pass of ``mode``, one block for each storage.

    Under a fake tensor mode the model may be as large as it likes.
    """
    log = EventLog()

    def annotate(text: str) -> None:
        log.metadata = text

    patches = {"storage_address": address_of, "annotate": annotate}
    with WatchedStorages(log), patch.multiple(memory_profile, **patches):
        step = assemble(case)
        ids, targets = random_batch(case)
        phases = step.phases(mode, ids, targets)
        for phase in phases.values():
            phase()
        log.events.clear()
        gradients: list = []
        with memory_profile.labelled_gradients(step, gradients), memory_profile.named_nodes(step) as name_nodes:
            for name, phase in phases.items():
                annotate("")
                log.phase(name)
                if name == "backward":
                    name_nodes()
                phase()
        labels = [*memory_profile.state_labels(step, ids=ids, targets=targets), *gradients]
        return log.snapshot([[label.address, label.category, label.name] for label in labels])
