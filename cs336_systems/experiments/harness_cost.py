"""What does measuring itself cost? This suite's clock against triton's, and a command's time beyond its timed steps.

On a GPU, ``time_kernel`` and ``triton.testing.do_bench`` time the same operation on the same tensors in alternating
rounds; each round yields one ratio of medians. On any machine ``benchmark_model.py --size small --mode step`` runs as a
user would run it, and its time beyond the timed steps is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from cs336_systems.case import Unsupported
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions
from cs336_systems.report.results import Column, ResultTable

if TYPE_CHECKING:
    import torch

    from cs336_systems.harness.record import Metric

KERNELS = ("matmul 1024 bf16", "matmul 4096 bf16", "matmul 8192 bf16", "copy 256 MiB", "add 256 KiB")
COMMAND = "benchmark_model.py --size small --mode step"


@dataclass(frozen=True)
class Options(RunOptions):
    """What does measuring itself cost?"""

    timeout: float = 600.0
    rounds: int = 10
    """Alternating rounds per kernel; each yields one ratio."""


@dataclass(frozen=True)
class HarnessCell:
    """One kernel to time with both clocks, or the command."""

    device: str
    subject: str
    rounds: int
    seed: int

    @property
    def variant(self) -> str:
        return "command" if self.subject == COMMAND else "kernel"

    def __str__(self) -> str:
        return self.subject


def make_cells(options: Options) -> list[HarnessCell]:
    """Every kernel, and the command."""
    return [HarnessCell(options.device, subject, options.rounds, options.seed) for subject in (*KERNELS, COMMAND)]


def make_operation(subject: str, device: torch.device) -> Callable[[], object]:
    """The operation that a kernel's name describes, on random data."""
    import torch

    kind, size, *_ = subject.split()
    if kind == "matmul":
        a, b = (torch.randn(int(size), int(size), device=device).bfloat16() for _ in range(2))
        return lambda: a @ b
    if kind == "copy":
        source = torch.randn(int(size) * 2**18, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    x = torch.randn(int(size) * 2**8, device=device)
    return lambda: x.add_(1.0)


def measure(cell: HarnessCell) -> list[Metric]:
    """Both clocks on one kernel, or the overhead of the command.

    Raises:
        Unsupported: a kernel on a CPU, where do_bench cannot run.
    """
    if cell.subject == COMMAND:
        return measure_command(cell.device)
    if cell.device != "cuda":
        raise Unsupported("triton.testing.do_bench needs a CUDA device")
    import torch
    from triton.testing import do_bench

    from cs336_systems.harness.clock import time_kernel
    from cs336_systems.harness.record import Metric

    torch.manual_seed(cell.seed)
    device = torch.device(cell.device)
    operation = make_operation(cell.subject, device)
    ours, theirs = [], []
    for _ in range(cell.rounds):
        ours.append(median(time_kernel(operation, device=device, warmup=10, samples=100)))
        theirs.append(do_bench(operation, warmup=10, rep=50, return_mode="median"))
    return [
        Metric("time_kernel", "ms", ours),
        Metric("do_bench", "ms", theirs),
        Metric("time_kernel_over_do_bench", "ratio", [a / b for a, b in zip(ours, theirs, strict=True)]),
    ]


def measure_command(device: str) -> list[Metric]:
    """Wall-clock seconds of the command, the seconds inside its timed steps, and the difference."""
    import subprocess
    import sys
    import tempfile

    from cs336_systems.harness.record import Metric, read_rows

    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).resolve().parents[2] / "benchmarks" / "benchmark_model.py"
        options = ["--size", "small", "--mode", "step", "--device", device, "--out", folder]
        started = time.perf_counter()
        subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
        wall = time.perf_counter() - started
        rows = read_rows(Path(folder) / "benchmark_model.csv")
    steps = rows[rows["metric"].isin(["step", "warmup_step"])]
    if steps.empty:
        raise RuntimeError(f"the command measured no step: {', '.join(rows['message'])}")
    timed = sum(sum(samples) for samples in steps["samples"]) / 1e3
    seconds = {"command": wall, "timed_steps": timed, "overhead": wall - timed}
    return [Metric(name, "s", [value]) for name, value in seconds.items()]


OVERHEADS = ResultTable(
    settings=("subject", "metric"),
    always=("subject", "metric"),
    columns=(
        Column("median", lambda line: f"{line.last['median']:.4g} {line.last['unit']}" if line.metrics else "", rank=0),
        Column("p10–p90", lambda line: f"{line.last['p10']:.4g}–{line.last['p90']:.4g}" if line.metrics else ""),
    ),
)


EXPERIMENT = Experiment(
    "benchmark_harness",
    HarnessCell,
    make_cells,
    one_stage(measure, lambda cell: 10.0 if cell.subject == COMMAND else 1.0),
    presented(OVERHEADS.of),
    ("time_kernel", "do_bench", "time_kernel_over_do_bench", "command", "timed_steps", "overhead"),
    options=Options,
)
