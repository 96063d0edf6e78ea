"""What does each step of data parallelism buy? The ladder naive, flat, overlapped, bucketed, beside torch's DDP.

    uv run benchmarks/benchmark_ddp.py                                          # two ranks, under a minute on a CPU
    uv run benchmarks/benchmark_ddp.py --world-size 1 2 --ddp overlapped bucketed torch --out results/
    uv run torchrun --nproc-per-node 2 benchmarks/benchmark_ddp.py --size xl --dtype fp32 autocast-bf16 --out results/
    uv run torchrun --nproc-per-node 4 benchmarks/benchmark_ddp.py --ddp bucketed torch --bucket-size-mb 1 10 100 1000
    torchrun benchmarks/benchmark_ddp.py --ddp naive overlapped --trace traces/      # pictures: what runs when

Every rank trains on its own random batch of ``--batch-size``; a step takes as long as its slowest rank. Exposed
communication is the step less the same step without communication (``no_sync``), taken in turn in the same processes.
After the run every parameter must be the same bits on all ranks, or the cell fails.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from cs336_systems.experiments.data_parallel.measure import SIZED, DataParallelCell, measure_data_parallel
from cs336_systems.experiments.data_parallel.table import data_parallel_table
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
from cs336_systems.experiments.ranked import RankedBenchmark, draw_traces
from cs336_systems.harness.ranks import one_rank_per_gpu, resolve_world_sizes
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.console import Format, check_device, exit_with, parse_for_device, show

Rung = Literal["naive", "flat", "overlapped", "bucketed", "torch"]
Dtype = Literal["fp32", "tf32", "bf16", "autocast-bf16"]
Switch = Literal["off", "on"]


@dataclass(frozen=True)
class Options:
    """What does each step of data parallelism buy?"""

    ddp: tuple[Rung, ...] = get_args(Rung)
    """naive, flat: after backward, a collective per gradient or one for all; overlapped, bucketed: during backward, a
    collective per gradient or per bucket; torch: DistributedDataParallel."""
    bucket_size_mb: tuple[float, ...] = (25.0,)
    """MiB per bucket, of bucketed and torch."""
    communication_dtype: tuple[Literal["same", "bf16"], ...] = ("same",)
    """In which gradients travel and are added up: their own dtype, or bf16."""
    size: tuple[str, ...] = ("small",)
    """Named model sizes, as benchmark_model.py takes them."""
    context_length: tuple[int, ...] = (512,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (4,)
    """Sequences per step and rank."""
    dtype: tuple[Dtype, ...] = ("fp32",)
    """How numbers are stored and multiplied."""
    compile: tuple[Switch, ...] = ("off",)
    """torch.compile of each block and of the loss; --compile alone means on."""
    optimizer: tuple[Literal["reference", "torch-fused"], ...] = ("torch-fused",)
    """AdamW written out, or torch's fused kernel."""
    world_size: tuple[int, ...] | None = None
    """Ranks on this machine, each number a world of its own; by default all GPUs, or two ranks on a CPU. Under torchrun
    it is torchrun's number."""
    warmup: int = 5
    """Steps before the recorded ones."""
    steps: int = 20
    """Recorded steps with communication; as many without it."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run: cuda with NCCL, cpu with gloo."""
    seed: int = 0
    """Of parameters and tokens."""
    trace: Path | None = None
    """Folder for a recording and a picture of rank 0 per cell (torch.profiler)."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_ddp.csv); the table then holds earlier rows of that file too."""
    format: Format = "auto"
    """Of the table: auto draws it on a terminal and writes Markdown elsewhere."""
    timeout: float = 900.0
    """Seconds after which a collective, and a cell, is given up."""


def default_options(device: str) -> Options:
    """The defaults on a device; without a GPU they shrink, so that a bare command ends in under a minute."""
    if device == "cuda":
        return Options()
    return Options(device="cpu", size=("tiny",), context_length=(128,), batch_size=(1,), warmup=1, steps=6)


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[DataParallelCell]:
    """The grid, the rungs of one model next to each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    names = (
        "ddp",
        "bucket_size_mb",
        "communication_dtype",
        "size",
        "context_length",
        "batch_size",
        "dtype",
        "optimizer",
    )
    check_given(options, *names)
    check_positive(options, "bucket_size_mb", "context_length", "batch_size", "steps")
    check_not_negative(options, "warmup")
    check_seed(options.seed, bits=31)
    check_timeout(options.timeout)
    check_dtypes(options.dtype, options.device)
    worlds = resolve_world_sizes(options.world_size, one_rank_per_gpu(options.device))
    sizes = resolved_sizes(options.size, options.context_length)
    rungs = [(r, mb) for r in options.ddp for mb in (options.bucket_size_mb if r in SIZED else (None,))]
    grid = itertools.product(
        worlds,
        sizes,
        options.batch_size,
        options.context_length,
        options.dtype,
        options.compile or ("on",),
        options.optimizer,
        options.communication_dtype,
        rungs,
    )
    return [
        DataParallelCell(
            device=options.device,
            ddp=rung,
            bucket_size_mb=mb,
            communication_dtype=sent,
            size=size,
            batch_size=batch_size,
            context_length=context_length,
            dtype=dtype,
            compile=compiled,
            optimizer=optimizer,
            world_size=world_size,
            warmup=options.warmup,
            steps=options.steps,
            seed=options.seed,
        )
        for world_size, size, batch_size, context_length, dtype, compiled, optimizer, sent, (rung, mb) in grid
    ]


def describe(cell: DataParallelCell) -> str:
    """A cell in a few words."""
    bucket = "" if cell.bucket_size_mb is None else f" {cell.bucket_size_mb:g} MiB"
    sent = "" if cell.communication_dtype == "same" else f" sent as {cell.communication_dtype}"
    compiled = " compiled" if cell.compile == "on" else ""
    return (
        f"{cell.ddp}{bucket}{sent} on {cell.world_size} ranks: {cell.size} batch {cell.batch_size} "
        f"context {cell.context_length} {cell.dtype}{compiled} {cell.optimizer}"
    )


BENCHMARK = RankedBenchmark(
    "benchmark_ddp",
    DataParallelCell,
    measure_data_parallel,
    describe,
    ("step", "backward", "local_step", "exposed", "exposed_share", "hidden_share", "tokens_per_s", "sent"),
)


def main() -> int:
    """Parse, check everything that can be checked before running, run; rank 0 presents."""
    options = parse_options()
    note = small_defaults_note(options, default_options, "size", "context_length", "batch_size", "warmup", "steps")

    def present(outcomes: list[Outcome], csv: Path | None) -> None:
        show(data_parallel_table(read_rows(csv) if csv else outcome_rows(outcomes)), options.format)
        if options.trace is not None:
            draw_traces(outcomes, options.trace, describe)

    benchmark = replace(BENCHMARK, measure=functools.partial(measure_data_parallel, trace=options.trace))
    return benchmark.run(options, lambda: make_cells(options), present, note)


if __name__ == "__main__":
    exit_with(BENCHMARK.name, main)
