"""Does this suite's clock agree with triton's?

``time_kernel`` and ``triton.testing.do_bench`` time the same operation on the same tensors in alternating rounds; each
round yields one ratio of medians.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from cs336_systems.case import Unsupported
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions
from cs336_systems.report.results import Column, ResultTable

if TYPE_CHECKING:
    import torch

    from cs336_systems.harness.record import Metric

SUBJECTS = ("matmul 1024 bf16", "matmul 4096 bf16", "matmul 8192 bf16", "copy 256 MiB", "add 256 KiB")


@dataclass(frozen=True)
class Options(RunOptions):
    """Does this suite's clock agree with triton's?"""

    timeout: float = 600.0
    rounds: int = 10
    """Alternating rounds per kernel; each yields one ratio."""


@dataclass(frozen=True)
class HarnessCell:
    """One kernel to time with both clocks; the fields are columns."""

    device: str
    subject: str
    rounds: int
    seed: int
    variant = "kernel"

    def __str__(self) -> str:
        return self.subject


def make_cells(options: Options) -> list[HarnessCell]:
    """Every kernel."""
    return [HarnessCell(options.device, subject, options.rounds, options.seed) for subject in SUBJECTS]


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
    """Both clocks on one kernel.

    Raises:
        Unsupported: a CPU, where do_bench cannot run.
    """
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
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [
        Metric("time_kernel", "ms", ours),
        Metric("do_bench", "ms", theirs),
        Metric("time_kernel_over_do_bench", "ratio", ratios),
    ]


CLOCKS = ResultTable(
    settings=("subject",),
    always=("subject",),
    columns=(
        Column("time_kernel ms", "time_kernel", spread=True),
        Column("do_bench ms", "do_bench", spread=True),
        Column("ratio", "time_kernel_over_do_bench", ".3f", spread=True, rank=0, note="time_kernel over do_bench"),
    ),
)

EXPERIMENT = Experiment(
    "benchmark_harness",
    HarnessCell,
    make_cells,
    one_stage(measure),
    presented(CLOCKS.of),
    ("time_kernel", "do_bench", "time_kernel_over_do_bench"),
    options=Options,
)
