"""What does sharding the optimizer state save, and what does it cost? Memory by category and moment, and time.

    uv run benchmarks/benchmark_sharded_optimizer.py                            # tiny, two gloo ranks; one GPU per rank
    uv run benchmarks/benchmark_sharded_optimizer.py --size xl --world-size 2 --repeat 3 --out results/
    uv run torchrun --nproc-per-node 2 benchmarks/benchmark_sharded_optimizer.py --size xl --repeat 3 --out results/
    torchrun benchmarks/benchmark_sharded_optimizer.py --sharding replicated owned                 # a world of one rank

Four ways to hold the state of AdamW (``experiments/sharded_optimizer/measure.py`` says how each is set up and read):
replicated (plain data parallelism), owned (the handout's sharded optimizer), scattered (ZeRO stage 1), and torch's
ZeroRedundancyOptimizer. ``--repeat`` runs all of them in turn, several times, so that the comparison is of neighbours;
ratios are to replicated of the same repeat. Batch sizes are per rank. Time is that of the slowest rank in every step.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cs336_systems.costs.sharding import DEFAULT_BUCKET_SIZE_MB
from cs336_systems.experiments.options import (
    check_dtypes,
    check_given,
    check_not_negative,
    check_positive,
    check_seed,
    check_timeout,
    resolved_sizes,
    small_defaults_note,
)
from cs336_systems.experiments.ranked import RankedBenchmark
from cs336_systems.experiments.sharded_optimizer.measure import SHARDINGS, measure_sharding
from cs336_systems.experiments.sharded_optimizer.table import draw_memory, memory_table, time_table
from cs336_systems.harness.ranks import one_rank_per_gpu, resolve_world_sizes
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.console import Format, check_device, exit_with, parse_for_device, show

Sharding = Literal["replicated", "owned", "scattered", "torch-zero"]


@dataclass(frozen=True)
class Options:
    """What does sharding the optimizer state save, and what does it cost?"""

    sharding: tuple[Sharding, ...] = SHARDINGS  # type: ignore[assignment]
    """Ways to hold the optimizer state."""
    size: tuple[str, ...] = ("xl",)
    """Named model sizes."""
    context_length: tuple[int, ...] = (512,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (4,)
    """Sequences per rank and step."""
    dtype: tuple[Literal["fp32", "tf32", "bf16", "autocast-bf16"], ...] = ("fp32",)
    """How numbers are stored and multiplied."""
    optimizer: tuple[Literal["reference", "torch-fused"], ...] = ("torch-fused",)
    """AdamW written out, or torch's fused kernel."""
    bucket_size_mb: tuple[float, ...] = (DEFAULT_BUCKET_SIZE_MB,)
    """MiB of the buckets in which gradients and parameters travel (not torch-zero's parameters: one per rank)."""
    world_size: tuple[int, ...] | None = None
    """Ranks on this machine, each number a world of its own; by default all GPUs, or two ranks on a CPU. Under torchrun
    it is torchrun's number."""
    warmup: int = 3
    """Steps before the recorded ones, besides the two in which memory is read."""
    steps: int = 10
    """Recorded steps."""
    repeat: int = 1
    """Times that the whole grid is run, so that repeats of a cell are interleaved with the other cells."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run: cuda with NCCL, cpu with gloo."""
    seed: int = 0
    """Of parameters and tokens."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_sharded_optimizer.csv) and where their figure is drawn."""
    format: Format = "auto"
    """Of the tables: auto draws them on a terminal and writes Markdown elsewhere."""
    timeout: float = 600.0
    """Seconds after which a collective, and a cell, is given up."""


@dataclass(frozen=True)
class Cell:
    """One way to hold the state of one model; the fields are columns."""

    device: str
    world_size: int
    size: str
    batch_size: int
    context_length: int
    dtype: str
    optimizer: str
    bucket_size_mb: float
    sharding: str
    warmup: int
    steps: int
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return self.sharding


def default_options(device: str) -> Options:
    """The defaults on a device; without a GPU they shrink, so that a bare command ends in under a minute."""
    if device == "cuda":
        return Options()
    return Options(
        device="cpu", size=("tiny",), context_length=(128,), batch_size=(1,), bucket_size_mb=(0.1,), warmup=1, steps=5
    )


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[Cell]:
    """The grid, the ways to hold state innermost, so that those that are compared are neighbours.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    check_given(options, "sharding", "size", "context_length", "batch_size", "dtype", "optimizer", "bucket_size_mb")
    check_positive(options, "context_length", "batch_size", "bucket_size_mb", "steps", "repeat")
    check_not_negative(options, "warmup")
    check_seed(options.seed)
    check_timeout(options.timeout)
    check_dtypes(options.dtype, options.device)
    worlds = resolve_world_sizes(options.world_size, one_rank_per_gpu(options.device))
    sizes = resolved_sizes(options.size, options.context_length)
    grid: Iterator[Any] = itertools.product(
        (options.device,),
        worlds,
        sizes,
        options.batch_size,
        options.context_length,
        options.dtype,
        options.optimizer,
        options.bucket_size_mb,
        options.sharding,
        (options.warmup,),
        (options.steps,),
        (0,),
        (options.seed,),
    )
    cells = [Cell(*values) for values in grid]
    return [replace(cell, repeat=repeat) for repeat in range(options.repeat) for cell in cells]


def describe(cell: Cell) -> str:
    """A cell in a few words, for the progress display."""
    return (
        f"{cell.size} batch {cell.batch_size} context {cell.context_length} {cell.dtype} AdamW {cell.optimizer} "
        f"{cell.sharding} on {cell.world_size} ranks"
    )


def present(outcomes: list[Outcome], csv: Path | None, form: Format) -> None:
    """Show the tables of time and of memory, and draw the memory of all rows of the file."""
    rows = outcome_rows(outcomes)
    show(time_table(rows), form)
    show(memory_table(rows), form)
    if csv:
        draw_memory(read_rows(csv), csv.with_suffix(".png"))


BENCHMARK = RankedBenchmark(
    "benchmark_sharded_optimizer",
    Cell,
    measure_sharding,
    describe,
    (
        *("forward", "backward", "optimizer", "step"),
        *("after_step_optimizer_state", "predicted_optimizer_state", "after_step_allocated", "before_step_peak"),
    ),
)


def main() -> int:
    """Parse, check everything that can be checked before running, run; rank 0 presents."""
    options = parse_options()
    note = small_defaults_note(
        options, default_options, "size", "context_length", "batch_size", "bucket_size_mb", "warmup", "steps"
    )
    show_outcomes = functools.partial(present, form=options.format)
    return BENCHMARK.run(options, lambda: make_cells(options), show_outcomes, note)


if __name__ == "__main__":
    exit_with(BENCHMARK.name, main)
