"""``benchmark_harness``: our clock against triton's ``do_bench``, and a whole command's time above its timed steps."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from cs336_systems.case import Unsupported
from cs336_systems.experiments.driver import Experiment, one_stage
from cs336_systems.experiments.harness_cost.cells import COMMAND, HarnessCell, Options, make_cells
from cs336_systems.harness.clock import time_kernel
from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.results import Column, ResultTable
from cs336_systems.report.show import show


def make_operation(subject: str, device: torch.device) -> Callable[[], object]:
    """The operation that a kernel's name describes, on random data."""
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
    from triton.testing import do_bench

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
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).resolve().parents[3] / "benchmarks" / "benchmark_model.py"
        options = ["--size", "small", "--mode", "step", "--device", device, "--out", folder]
        started = time.perf_counter()
        subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
        wall = time.perf_counter() - started
        rows = read_rows(Path(folder) / "benchmark_model.csv")
    steps = rows[rows["metric"].isin(["step", "warmup_step"])]
    if steps.empty:
        raise RuntimeError(f"the command measured no step: {', '.join(rows['message'])}")
    timed = sum(sum(samples) for samples in steps["samples"]) / 1e3
    return [
        Metric("command", "s", [wall]),
        Metric("timed_steps", "s", [timed]),
        Metric("overhead", "s", [wall - timed]),
    ]


OVERHEADS = ResultTable(
    settings=("subject", "metric"),
    always=("subject", "metric"),
    columns=(
        Column("median", lambda line: f"{line.last['median']:.4g} {line.last['unit']}" if line.metrics else "", rank=0),
        Column("p10–p90", lambda line: f"{line.last['p10']:.4g}–{line.last['p90']:.4g}" if line.metrics else ""),
    ),
)


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(OVERHEADS.of(outcome_rows(outcomes)), options.format)


EXPERIMENT = Experiment(
    "benchmark_harness",
    HarnessCell,
    make_cells,
    one_stage(measure, lambda cell: 10.0 if cell.subject == COMMAND else 1.0),
    present,
    ("time_kernel", "do_bench", "time_kernel_over_do_bench", "command", "timed_steps", "overhead"),
)
