"""Checkpoints written in the background: training waits only for a copy to host memory, not for the disk.

    with BackgroundSaver(folder, model, optimizer, keep_last=2) as saver:
        saver.reserve(budget_bytes)              # after the first step: allocates host memory for copies in a thread
        saver.save(step, extra={"loader": ...})  # waits for the previous save, then copies
        for saved in saver.finished(): ...       # how saves ended since the last call
        for saved in saver.wait(): ...

``checkpoint.py`` describes the files and why a kill at any moment loses nothing. A thread on each rank writes; the
threads communicate over a gloo group of their own. A save that fails is reported, and older checkpoints stay as they
are. Each save waits for the previous one. Where host memory is too small for the copies, ``save`` waits for the disk.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.checkpoint import Collected, check_kept, collect, write
from cs336_systems.distributed.stretches import Stretch
from cs336_systems.kernels.host_memory import Slab, aligned, host_slab


@dataclass(frozen=True)
class Saved:
    """How a save ended; ``path`` is None if it has failed, which ``error`` explains.

    Attributes:
        n_bytes: bytes of this rank's part.
        stall_seconds: time that the caller of ``save`` waited.
        waited_seconds: the part of ``stall_seconds`` spent waiting until the previous save was written.
        seconds: time until all ranks were done.
    """

    step: int
    path: Path | None
    error: str | None
    n_bytes: int
    stall_seconds: float
    waited_seconds: float
    seconds: float


class BackgroundSaver:
    """Saves a model and its optimizer into a folder; all ranks construct it; arguments as for ``save_checkpoint``.

    Leaving its context waits for the save in progress, except after a ``KeyboardInterrupt``; files left half-written
    are never mistaken for a checkpoint.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
    ) -> None:
        check_kept(0, keep_last, keep_every)
        self._folder, self._model, self._optimizer = Path(folder), model, optimizer
        self._kept = keep_last, keep_every
        self._device = next(model.parameters()).device
        self._own_group = dist.new_group(backend="gloo")
        self._slab: Slab | None = None
        self._short: str | None = None
        self._thread: threading.Thread | None = None
        self._saves = False  # whether the thread writes a checkpoint, rather than allocating host memory
        self._finished: list[Saved] = []

    def reserve(self, budget_bytes: int) -> str | None:
        """Begin to allocate host memory for copies of the current tensors; a collective.

        If this rank's copies exceed the budget, returns the reason why saves will wait for the disk.
        """
        n_bytes = _n_bytes(collect(self._model, self._optimizer, 0, None))
        if n_bytes > budget_bytes:
            self._short = f"{n_bytes:,} bytes of copies do not fit the {budget_bytes:,} of host memory that are free"
            return self._short
        self._start(lambda: self._get_slab(n_bytes))
        return None

    def save(self, step: int, extra: Mapping[str, Any] | None = None, keep_step: int | None = None) -> None:
        """Wait for the previous save, copy everything and begin to write it; a collective, which raises ValueError.

        Args:
            keep_step: the step of a checkpoint that is neither removed nor counted in ``keep_last``.
        """
        check_kept(step, *self._kept)
        began, saves = time.perf_counter(), self._saves
        self._join()
        waited, self._saves = time.perf_counter() - began if saves else 0.0, True
        collected = collect(self._model, self._optimizer, step, extra)
        copied = self._copied(collected)
        stall = time.perf_counter() - began

        def finish() -> None:
            path, error = None, None
            try:
                path = write(self._folder, copied or collected, self._own_group, *self._kept, keep_step)
            except Exception as raised:  # a failed save does not end training
                error = str(raised)
            seconds = time.perf_counter() - began
            stalled = stall if copied else seconds
            self._finished.append(Saved(step, path, error, _n_bytes(collected), stalled, waited, seconds))

        if copied is None:
            finish()
        else:
            self._start(finish)

    def finished(self) -> list[Saved]:
        """Return the saves that have ended since the last call, oldest first, without waiting."""
        done = len(self._finished)
        told, self._finished[:done] = self._finished[:done], []
        return told

    def wait(self) -> list[Saved]:
        """Wait for the save in progress, then return what ``finished`` does."""
        self._join()
        return self.finished()

    def _copied(self, collected: Collected) -> Collected | None:
        """Copy to host memory, complete when this returns; None if there is too little of it."""
        if self._short is None and (self._slab is None or self._slab.n_bytes < _n_bytes(collected)):
            self._get_slab(_n_bytes(collected))
        if self._short is not None or self._slab is None:
            return None
        self._slab.n_taken, copies = 0, dict[str, Stretch]()
        for name, stretch in collected.stretches.items():
            values = self._slab.take(stretch.values.shape, stretch.values.dtype)
            copies[name] = replace(stretch, values=values.copy_(stretch.values, non_blocking=True))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return Collected(copies, collected.marker)

    def _get_slab(self, n_bytes: int) -> None:
        """Allocate pinned memory, into which a GPU copies 50 GB/s."""
        self._slab = None  # the previous slab, whose tensors have been written by now
        try:
            self._slab = host_slab(n_bytes, self._device)
        except RuntimeError as error:
            self._short = str(error)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            if self._device.type != "cuda":
                return work()
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                work()  # work that waits for the current stream must not wait for training

        self._join()
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return
        self._join()
        dist.destroy_process_group(self._own_group)


def _n_bytes(collected: Collected) -> int:
    """Bytes of a slab that holds copies of these tensors."""
    return sum(aligned(stretch.values.nbytes) for stretch in collected.stretches.values())
