"""Does this suite's clock agree with triton's?

``time_kernel`` and ``triton.testing.do_bench`` time the same operation on the same tensors in alternating rounds; each
round yields one ratio of medians.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from cs336_systems.case import Unsupported
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions, every
from cs336_systems.report.results import Column, ResultTable

if TYPE_CHECKING:
    from cs336_systems.harness.record import Metric

SUBJECTS = ("matmul 1024 bf16", "matmul 4096 bf16", "matmul 8192 bf16", "copy 256 MiB", "add 256 KiB")


@dataclass(frozen=True)
class HarnessCell:
    """One kernel to time with both clocks; the fields are columns."""

    device: str
    subject: str
    rounds: int = option(10, "Alternating rounds per kernel; each yields one ratio.", several=False, sign="positive")
    seed: int = 0
    variant = "kernel"

    def __str__(self) -> str:
        return self.subject


Options: Any = options_of(HarnessCell, RunOptions)


def make_cells(options: Any) -> list[HarnessCell]:
    return every(HarnessCell, options, subject=SUBJECTS)


def measure(cell: HarnessCell) -> list[Metric]:
    """Both clocks on one kernel; raises Unsupported on a CPU, where do_bench cannot run."""
    if cell.device != "cuda":
        raise Unsupported("triton.testing.do_bench needs a CUDA device")
    import torch
    from triton.testing import do_bench

    from cs336_systems.harness.clock import time_kernel
    from cs336_systems.harness.record import Metric

    torch.manual_seed(cell.seed)
    kind, size, *_ = cell.subject.split()
    shape = {"matmul": (int(size), int(size)), "copy": (int(size) * 2**18,), "add": (int(size) * 2**8,)}[kind]
    a, b = torch.randn(2, *shape, device=cell.device, dtype=torch.bfloat16 if kind == "matmul" else torch.float32)
    operation: Any = {"matmul": lambda: a @ b, "copy": lambda: a.copy_(b), "add": lambda: a.add_(1.0)}[kind]
    ours, theirs = [], []
    for _ in range(cell.rounds):
        ours.append(median(time_kernel(operation, device=torch.device(cell.device), warmup=10, samples=100)))
        theirs.append(do_bench(operation, warmup=10, rep=50, return_mode="median"))
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    return [Metric(*named, samples) for named, samples in zip(_METRICS.items(), (ours, theirs, ratios), strict=True)]


_METRICS = {"time_kernel": "ms", "do_bench": "ms", "time_kernel_over_do_bench": "ratio"}
"""The unit of each metric, by name."""
_COLUMNS = tuple(Column(f"{name} {unit}", name, spread=True) for name, unit in _METRICS.items())
CLOCKS = ResultTable(("subject",), _COLUMNS, always=("subject",))

EXPERIMENT = Experiment(
    *("benchmark_harness", HarnessCell, make_cells, one_stage(measure), presented(CLOCKS.of), tuple(_METRICS)),
    options=Options,
)
