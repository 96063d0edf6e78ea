"""Cells for the sweep's tests: each names how it ends, and ``measure`` ends so, in one process or on several ranks."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.case import Unsupported
from cs336_systems.distributed.process_group import Rank
from cs336_systems.hardware import MIB
from cs336_systems.harness.clock import time_phases_of_ranks
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.harness.memory import PeakMeter
from cs336_systems.harness.record import Metric

SKEW_S = 0.02

calls: list[str] = []
"""Grows with every measurement in this process: a fresh process starts with an empty one."""


@dataclass(frozen=True)
class Cell:
    """``what`` names an entry of ``ENDINGS``; some endings leave notes in ``folder``."""

    what: str
    folder: str = ""
    device: str = "cpu"
    seed: int = 7

    @property
    def variant(self) -> str:
        return "test"

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class RankedCell(Cell):
    """``what`` may add `` on rank 1``: the other ranks then wait for that one in a collective."""

    world_size: int = 2


def measure(cell: Cell, rank: Rank | None = None) -> list[Metric]:
    """End as the cell says."""
    calls.append(cell.what)
    if rank is None:
        return ENDINGS[cell.what](cell)
    return RANKED_ENDINGS.get(cell.what, _of_one_rank)(cell, rank)


def _of_one_rank(cell: Cell, rank: Rank) -> list[Metric]:
    what, _, only = cell.what.partition(" on rank ")
    return ENDINGS[what](cell) if only in ("", str(rank.rank)) else _timed(cell, rank)


def _timed(cell: Cell, rank: Rank) -> list[Metric]:
    """Steps in which rank 1 is slower than rank 0."""
    total = torch.ones(1)
    phases = {"skewed": lambda: time.sleep(SKEW_S * (1 + rank.rank)), "sum": lambda: dist.all_reduce(total)}
    times = time_phases_of_ranks(phases, rank, warmup=2, steps=3)
    same = torch.tensor(times.samples_ms["step"])
    dist.broadcast(same, 0)
    assert same.tolist() == torch.tensor(times.samples_ms["step"]).tolist()
    return [
        *(Metric(name, "ms", samples) for name, samples in times.samples_ms.items()),
        Metric("warmup_step", "ms", times.warmup_ms),
        Metric("sum_of_ones", "", [total.item()]),
        *_process(cell),
    ]


def _late(cell: Cell, rank: Rank) -> list[Metric]:
    """Rank 1 raises when the others have ended the cell."""
    dist.barrier()
    if rank.rank == 1:
        time.sleep(0.5)
        raise ArithmeticError("too late for the others to notice")
    return [Metric("never", "", [0.0])]


def _orphan(cell: Cell, rank: Rank) -> list[Metric]:
    """Rank 1 kills the process that has started it."""
    parent = multiprocessing.parent_process()
    if rank.rank == 1 and parent is not None and parent.pid is not None:
        os.kill(parent.pid, signal.SIGKILL)
    time.sleep(600)
    return []


def _stuck(cell: Cell, rank: Rank) -> list[Metric]:
    """Rank 1 raises while rank 0 is busy with something that nothing interrupts."""
    if rank.rank == 1:
        raise ArithmeticError("nobody hears this")
    time.sleep(600)
    return []


def fake_ceiling(cell: object) -> list[Metric]:
    """Stands in for the measured ceilings of a machine."""
    return [Metric("matmul_ceiling", "TFLOP/s", [1.0, 1.1]), Metric("copy_ceiling", "GB/s", [20.0, 21.0])]


def fake_model(cell: object, *, ceilings: dict[str, dict[str, float]], force: bool) -> list[Metric]:
    """Stands in for a measured training step; takes what ``benchmark_model`` passes."""
    return [
        Metric("forward", "ms", [0.5, 0.5, 0.5]),
        Metric("step", "ms", [1.0, 2.0, 3.0]),
        Metric("tokens_per_s", "1/s", [128e3], derived=True),
    ]


def fake_large_model(cell: object, **passed: Any) -> list[Metric]:
    """``fake_model``, whose peak is 3.5 GiB."""
    return [*fake_model(cell, **passed), Metric("peak_memory", "GiB", [3.5])]


def _ok(cell: Cell) -> list[Metric]:
    return [Metric("value", "ms", [1.0, 2.0, 4.0]), Metric("rate", "1/s", [3.0], derived=True)]


def _process(cell: Cell) -> list[Metric]:
    return [Metric("pid", "", [os.getpid()]), Metric("calls", "", [len(calls)])]


def _rows_on_disk(cell: Cell) -> list[Metric]:
    """How many lines the CSV holds while this cell runs."""
    return [Metric("lines", "", [len(Path(cell.folder, "rows.csv").read_text().splitlines())])]


def _sleep(cell: Cell) -> list[Metric]:
    """Leave this process's id, and that of a process it started, then take far too long."""
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    note = Path(cell.folder, "pids.json")
    note.with_suffix(".part").write_text(json.dumps([os.getpid(), grandchild.pid]))
    note.with_suffix(".part").rename(note)
    time.sleep(600)
    return []


def _peak(cell: Cell) -> list[Metric]:
    """The peak of 200 MiB that are freed before it is read."""
    meter = PeakMeter(torch.device("cpu"))
    block = torch.ones(200 * MIB // 4)
    del block
    peak = meter.peak_bytes()
    return _process(cell) if peak is None else [Metric("peak", "MiB", [peak / MIB])]


def _peak_after_a_larger_one(cell: Cell) -> list[Metric]:
    block = torch.ones(500 * MIB // 4)
    del block
    return _peak(cell)


def _raises(error: BaseException) -> Callable[[Cell], list[Metric]]:
    def ending(cell: Cell) -> list[Metric]:
        raise error

    return ending


ENDINGS: dict[str, Callable[[Cell], list[Metric]]] = {
    "ok": _ok,
    "process": _process,
    "rows on disk": _rows_on_disk,
    "sleep": _sleep,
    "peak": _peak,
    "peak after a larger one": _peak_after_a_larger_one,
    "predicted-oom": _raises(PredictedOutOfMemory("needs 9.5 GiB, 1.5 GiB are free")),
    "unsupported": _raises(Unsupported("no tensor cores here")),
    "MemoryError": _raises(MemoryError("a list too long")),
    "allocator": lambda cell: [Metric("never", "", [torch.empty(2**50).numel()])],
    "exception": _raises(RuntimeError('first line, with a "quote"\nsecond line')),
    "NaN": lambda cell: [Metric("loss", "", [1.0, float("nan")])],
    "sys.exit": lambda cell: sys.exit(3),
    "SIGKILL": lambda cell: os.kill(os.getpid(), signal.SIGKILL),  # type: ignore[dict-item,func-returns-value]
}

RANKED_ENDINGS: dict[str, Callable[[Cell, Rank], list[Metric]]] = {
    **{"ok": _timed, "late": _late, "stuck": _stuck, "orphan": _orphan}
}
"""Those of all ranks together; for any other, ranks end as a cell of one process does."""
