"""What does a collective cost on this machine, and does a ring of equal links explain it?

    uv run benchmarks/benchmark_collectives.py                       # two ranks on a CPU; 2, 4 and 6 GPUs, if there
    uv run benchmarks/benchmark_collectives.py --world-size 2 4 --size-mb 1 100 --out results/
    uv run torchrun --nproc-per-node 4 benchmarks/benchmark_collectives.py --dtype fp32 bf16 --out results/
    torchrun benchmarks/benchmark_collectives.py                              # a world of one: calls that send nothing

Time is that of the slowest rank in every sample, a sample the mean of ``--calls`` calls one after another (nccl-tests
does so too: the host's launch latency is hidden but for the first). Sizes are total bytes, MB is 1e6 bytes; algbw and
busbw are those of nccl-tests. After timing, each collective runs once more and every element of every rank is checked.
Beside each time stands what a ring would take whose latency and bandwidth are fitted to all times of the same world and
run, and beside each busbw its share of the link's datasheet bandwidth.
"""

import functools
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from cs336_systems.costs.communication import COLLECTIVES, algbw, busbw
from cs336_systems.distributed.collectives import Exchange
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.collectives.table import collectives_table, draw_collectives
from cs336_systems.experiments.options import (
    check_given,
    check_not_negative,
    check_positive,
    check_timeout,
    small_defaults_note,
)
from cs336_systems.experiments.ranked import RankedBenchmark
from cs336_systems.harness.ranks import resolve_world_sizes, time_phases_of_ranks
from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.console import Format, check_device, exit_with, parse_for_device, show

CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ALIGNMENT = 128
"""Bytes of which every rank's part is a multiple, so that no part begins in the middle of a memory sector."""


@dataclass(frozen=True)
class Options:
    """What does a collective cost on this machine?"""

    collective: tuple[CollectiveName, ...] = COLLECTIVES  # type: ignore[assignment]
    """Which to time."""
    size_mb: tuple[float, ...] = (1, 10, 100, 1000)
    """Total sizes in MB of 1e6 bytes; rounded down to what the ranks divide into parts of whole 128 bytes."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ("fp32",)
    """Of the tensors."""
    world_size: tuple[int, ...] | None = None
    """Ranks on this machine, each number a world of its own; by default 2, 4 and 6 GPUs as far as there are any, or two
    ranks on a CPU. Under torchrun it is torchrun's number."""
    calls: int = 5
    """Calls per sample."""
    warmup: int = 5
    """Samples before the recorded ones."""
    steps: int = 20
    """Recorded samples."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run: cuda with NCCL, cpu with gloo."""
    seed: int = 0
    """Recorded only: the tensors hold a fixed pattern."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_collectives.csv) and where their figure is drawn."""
    format: Format = "auto"
    """Of the table: auto draws it on a terminal and writes Markdown elsewhere."""
    timeout: float = 300.0
    """Seconds after which a collective, and a cell, is given up."""


@dataclass(frozen=True)
class CollectiveCell:
    """One collective of one size in one world; the fields are columns."""

    device: str
    world_size: int
    dtype: str
    collective: str
    size_mb: float
    total_bytes: int
    calls: int
    warmup: int
    steps: int
    seed: int

    @property
    def variant(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"


def default_options(device: str) -> Options:
    """The defaults on a device; without a GPU they shrink, so that a bare command ends in under a minute."""
    if device == "cuda":
        return Options()
    return Options(device="cpu", size_mb=(1, 10), calls=1, warmup=1, steps=10)


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[CollectiveCell]:
    """The grid.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    check_given(options, "collective", "size_mb", "dtype")
    check_positive(options, "calls", "steps")
    check_not_negative(options, "warmup")
    check_timeout(options.timeout)
    gpus = tuple(n for n in (2, 4, 6) if n <= torch.cuda.device_count()) or (1,)
    worlds = resolve_world_sizes(options.world_size, gpus if options.device == "cuda" else (2,))
    cells = []
    for n, dtype, collective, size_mb in itertools.product(worlds, options.dtype, options.collective, options.size_mb):
        parts = int(size_mb * 1e6) // (n * _ALIGNMENT) if 0 < size_mb <= 8000 else 0
        if parts < 1:
            raise ValueError(f"--size-mb must lie between {n * _ALIGNMENT / 1e6:g} and 8000, got {size_mb:g}")
        total_bytes = parts * n * _ALIGNMENT
        counts = (options.calls, options.warmup, options.steps)
        cells.append(CollectiveCell(options.device, n, dtype, collective, size_mb, total_bytes, *counts, options.seed))
    return cells


def measure_collective(cell: CollectiveCell, rank: Rank) -> list[Metric]:
    """Time one collective on all ranks, then check it."""
    dtype = DTYPES[cell.dtype]
    exchange = Exchange(cell.collective, cell.total_bytes // dtype.itemsize, dtype, rank)

    def calls() -> None:
        for _ in range(cell.calls):
            exchange.run()

    phases = {"reset": exchange.reset, "calls": calls}  # summed again and again, in-place results would overflow
    times = time_phases_of_ranks(phases, rank, warmup=cell.warmup, steps=cell.steps)
    exchange.reset()
    exchange.run()
    wrong = torch.tensor([exchange.wrong_elements()], device=rank.device)
    dist.all_reduce(wrong)
    seconds = [ms / 1e3 / cell.calls for ms in times.samples_ms["calls"]]
    return [
        Metric("time", "ms", [1e3 * s for s in seconds]),
        Metric("algbw", "GB/s", [algbw(cell.total_bytes, s) / 1e9 for s in seconds], derived=True),
        Metric(
            "busbw",
            "GB/s",
            [busbw(cell.collective, cell.world_size, cell.total_bytes, s) / 1e9 for s in seconds],
            derived=True,
        ),
        Metric("wrong_elements", "", [wrong.item()]),
    ]


def describe(cell: CollectiveCell) -> str:
    """A cell in a few words, for the progress display."""
    return f"{cell.collective} {cell.size_mb:g} MB {cell.dtype} on {cell.world_size} ranks ({cell.variant})"


def present(outcomes: list[Outcome], csv: Path | None, form: Format) -> int:
    """Show the table and draw the figure; 1 if an element was wrong."""
    show(collectives_table(outcome_rows(outcomes)), form)
    if csv:
        draw_collectives(read_rows(csv), csv.with_suffix(".png"))
    wrong = [describe(outcome.cell) for outcome in outcomes if outcome.median("wrong_elements")]
    if wrong:
        print(f"{BENCHMARK.name}: wrong elements in {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


BENCHMARK = RankedBenchmark(
    "benchmark_collectives", CollectiveCell, measure_collective, describe, ("time", "algbw", "busbw", "wrong_elements")
)


def main() -> int:
    """Parse, check everything that can be checked before running, run; rank 0 presents."""
    options = parse_options()
    note = small_defaults_note(options, default_options, "size_mb", "calls", "warmup", "steps")
    show_outcomes = functools.partial(present, form=options.format)
    return BENCHMARK.run(options, lambda: make_cells(options), show_outcomes, note)


if __name__ == "__main__":
    exit_with(BENCHMARK.name, main)
