"""Cells for the sweep's tests: each names how it ends, and ``measure`` ends so. Imported by name in child processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cs336_systems.harness.memory import PeakMeter
from cs336_systems.harness.process import PredictedOutOfMemory, Unsupported
from cs336_systems.harness.record import Metric

MIB = 1024**2

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


def measure(cell: Cell) -> list[Metric]:
    """End as the cell says."""
    calls.append(cell.what)
    return ENDINGS[cell.what](cell)


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


def _ok(cell: Cell) -> list[Metric]:
    return [Metric("value", "ms", [1.0, 2.0, 4.0]), Metric("rate", "1/s", [3.0], derived=True)]


def _process(cell: Cell) -> list[Metric]:
    return [Metric("pid", "", [os.getpid()]), Metric("calls", "", [len(calls)])]


def _rows_on_disk(cell: Cell) -> list[Metric]:
    """How many lines the CSV holds while this cell runs."""
    return [Metric("lines", "", [len(Path(cell.folder, "rows.csv").read_text().splitlines())])]


def _sleep(cell: Cell) -> list[Metric]:
    """Leave this process's id, and that of a process it started, then take far too long."""
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    note = Path(cell.folder, "pids.json")
    note.with_suffix(".part").write_text(json.dumps([os.getpid(), grandchild.pid]))
    note.with_suffix(".part").rename(note)
    time.sleep(120)
    return []


def _peak(cell: Cell) -> list[Metric]:
    """The peak of 200 MiB that are freed before it is read."""
    meter = PeakMeter(torch.device("cpu"))
    block = torch.ones(200 * MIB // 4)
    del block
    return [Metric("peak", "MiB", [meter.peak_bytes() / MIB])]


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
    "os._exit": lambda cell: os._exit(3),
    "SIGKILL": lambda cell: os.kill(os.getpid(), signal.SIGKILL),  # type: ignore[dict-item,func-returns-value]
    "SIGSEGV": lambda cell: os.kill(os.getpid(), signal.SIGSEGV),  # type: ignore[dict-item,func-returns-value]
}
