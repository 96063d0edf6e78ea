"""What does measuring itself cost? Our clock beside triton's, and a command's time above its measured work.

    uv run benchmarks/benchmark_harness.py --out results/

On a GPU, ``time_kernel`` and ``triton.testing.do_bench`` time the same operation on the same tensors in alternating
rounds; each round yields one ratio of medians, which should lie within two percent of one. Anywhere, the whole of
``benchmark_model.py --size small --mode step`` is run as a user would, and what it took beyond its timed steps is
reported.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import pandas as pd
import torch
import tyro
from rich.console import Console

from cs336_systems.harness.clock import time_kernel
from cs336_systems.harness.process import Unsupported
from cs336_systems.harness.record import Metric, RowFile, read_rows
from cs336_systems.harness.sweep import Outcome, cell_columns, outcome_rows, run_sweep
from cs336_systems.report.console import Format, check_device, complain, exit_with, finish, show
from cs336_systems.report.tables import Table

BENCHMARK = "benchmark_harness"
KERNELS = ("matmul 1024 bf16", "matmul 4096 bf16", "matmul 8192 bf16", "copy 256 MiB", "add 256 KiB")
COMMAND = "benchmark_model.py --size small --mode step"


@dataclass(frozen=True)
class Options:
    """What does measuring itself cost?"""

    rounds: int = 10
    """Alternating rounds per kernel; each yields one ratio."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    seed: int = 0
    """Of the data."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_harness.csv)."""
    format: Format = "auto"
    """Of the table."""
    timeout: float = 600.0
    """Seconds after which a cell is killed."""


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
        script = Path(__file__).with_name("benchmark_model.py")
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


def overhead_table(rows: pd.DataFrame) -> Table:
    """One line per metric and subject."""
    lines = [
        {
            "subject": row["subject"],
            "metric": row["metric"],
            "median": f"{row['median']:.4g} {row['unit']}" if row["metric"] else "–",
            "p10–p90": f"{row['p10']:.4g}–{row['p90']:.4g}" if row["metric"] else "–",
            "status": row["status"] if row["status"] == "ok" else f"{row['status']}: {row['message']}",
        }
        for _, row in rows.iterrows()
    ]
    return Table("", pd.DataFrame(lines))


def main() -> int:
    """Run every cell, print the table."""
    default = Options() if torch.cuda.is_available() else Options(device="cpu")
    options = tyro.cli(Options, default=default, description=__doc__)
    csv = options.out / f"{BENCHMARK}.csv" if options.out else None
    if options.rounds < 1:
        return complain(BENCHMARK, f"--rounds must be positive, got {options.rounds}")
    try:
        check_device(options.device)
        row_file = RowFile(csv, cell_columns(HarnessCell)) if csv else None
    except ValueError as error:
        return complain(BENCHMARK, str(error))
    except OSError as error:
        return complain(BENCHMARK, f"{error.filename}: {error.strerror}")
    cells = [HarnessCell(options.device, subject, options.rounds, options.seed) for subject in (*KERNELS, COMMAND)]
    outcomes: list[Outcome] = []
    sweep = run_sweep(
        BENCHMARK,
        cells,
        measure,
        row_file=row_file,
        timeout_s=options.timeout,
        describe=lambda cell: cell.subject,
        cost=lambda cell: 10.0 if cell.subject == COMMAND else 1.0,
        console=Console(stderr=True),
    )
    try:
        outcomes.extend(sweep)
    except OSError as error:
        return complain(BENCHMARK, f"rows could not be written to {csv}: {error.strerror}; every earlier row is there")
    show(overhead_table(outcome_rows(outcomes)), options.format)
    metrics = ("time_kernel", "do_bench", "time_kernel_over_do_bench", "command", "timed_steps", "overhead")
    return finish(BENCHMARK, outcomes, lambda cell: cell.subject, metrics, csv)


if __name__ == "__main__":
    exit_with(BENCHMARK, main)
