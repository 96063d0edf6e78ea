"""Checkpoints written while training continues: it waits for a copy to host memory, not for the disk.

    with BackgroundSaver(folder, model, optimizer, keep_last=2) as saver:
        saver.reserve(budget_bytes)              # after the first step: host memory for the copies, had meanwhile
        saver.save(step, extra={"loader": ...})  # waits for the save before, and copies
        for saved in saver.finished(): ...       # what has become of saves since it was asked
        for saved in saver.wait(): ...

What is written, and how a kill at any moment loses nothing, is as in ``checkpoint.py``, by a thread of each rank; these
talk to each other over a gloo group of their own. A save that fails is told, leaves the older checkpoints as they are,
and training goes on. A save that comes while the one before is still being written waits for it, as what was
asked for is to be had, and tells how long. Where host memory is short of the copies, saves wait for the disk.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.checkpoint import Collected, check_kept, collect, group_of, write
from cs336_systems.distributed.host_copies import copies_in, n_bytes_of
from cs336_systems.kernels.host_memory import Slab, host_slab


@dataclass(frozen=True)
class Saved:
    """What has become of a save.

    Attributes:
        path: None if it has failed.
        error: why.
        n_bytes: of this rank's part.
        stall_seconds: that the caller of ``save`` waited.
        waited_seconds: of these, until the save before was written.
        seconds: until all ranks were done.
    """

    step: int
    path: Path | None
    error: str | None
    n_bytes: int
    stall_seconds: float
    waited_seconds: float
    seconds: float


class BackgroundSaver:
    """Saves a model and its optimizer into a folder; constructed by all ranks, arguments as of ``save_checkpoint``.

    Leaving its context waits for the save that is under way, unless a ``KeyboardInterrupt`` does; what is then left
    half-written is not mistaken for a checkpoint.

    Raises:
        ValueError: ``keep_last`` or ``keep_every`` is not positive, or FSDP divides the model among some ranks only.
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
        self._group = group_of(model)
        if (size := self._group.size()) != (all_ranks := dist.get_world_size()):
            raise ValueError(f"a model of {size} of {all_ranks} ranks cannot be saved meanwhile, one of all ranks can")
        self._own_group = dist.new_group(backend="gloo")
        self._slab: Slab | None = None
        self._short: str | None = None
        self._thread: threading.Thread | None = None
        self._saves = False
        """Whether the thread is one that writes, and none that gets host memory."""
        self._finished: list[Saved] = []

    def reserve(self, budget_bytes: int) -> str | None:
        """Begin to get host memory for copies of what there is now; a collective.

        Returns:
            Why saves will wait for the disk, if this rank's copies take more than the budget.
        """
        n_bytes = n_bytes_of(self._collect(0, None).tensors)
        if n_bytes > budget_bytes:
            self._short = f"{n_bytes:,} bytes of copies do not fit the {budget_bytes:,} of host memory that are free"
            return self._short

        def get() -> None:
            self._get_slab(n_bytes)

        self._start(get)
        return None

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Copy everything and begin to write it, after the save before; a collective.

        Raises:
            ValueError: as ``save_checkpoint``.
        """
        check_kept(step, *self._kept)
        began, saves = time.perf_counter(), self._saves
        self._join()
        waited, self._saves = time.perf_counter() - began if saves else 0.0, True
        collected = self._collect(step, extra)
        n_bytes = n_bytes_of(collected.tensors)
        copied = self._copied(collected)
        stall = time.perf_counter() - began

        def finish() -> None:
            path, error = None, None
            try:
                path = write(self._folder, copied or collected, self._own_group, *self._kept)
            except Exception as raised:  # nothing that goes wrong here is to end the training
                error = str(raised)
            seconds = time.perf_counter() - began
            self._finished.append(Saved(step, path, error, n_bytes, stall if copied else seconds, waited, seconds))

        if copied is None:
            finish()
        else:
            self._start(finish)

    def finished(self) -> list[Saved]:
        """What this has not told of yet, oldest first; waits for nothing."""
        done = len(self._finished)
        told, self._finished[:done] = self._finished[:done], []
        return told

    def wait(self) -> list[Saved]:
        """The same, with the save that is under way."""
        self._join()
        return self.finished()

    def _collect(self, step: int, extra: Mapping[str, Any] | None) -> Collected:
        return collect(self._model, self._optimizer, step, extra, self._group)

    def _copied(self, collected: Collected) -> Collected | None:
        """In host memory; None where that is short."""
        if self._short is not None:
            return None
        n_bytes = n_bytes_of(collected.tensors)
        if self._slab is None or self._slab.n_bytes < n_bytes:
            self._get_slab(n_bytes)
        if self._slab is None:
            return None
        return Collected(copies_in(self._slab, collected.tensors), collected.marker)

    def _get_slab(self, n_bytes: int) -> None:
        self._slab = None  # the one before, whose tensors are written by now
        try:
            self._slab = host_slab(n_bytes, self._device)
        except RuntimeError as error:
            self._short = str(error)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            if self._device.type != "cuda":
                return work()
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                work()  # whatever waits for the current stream is not to wait for training

        self._join()
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            return
        self._join()
        dist.destroy_process_group(self._own_group)
