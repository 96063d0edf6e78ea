"""What does full sharding buy, and what does it cost? Our FSDP beside torch's FSDP2 and beside data parallelism.

    uv run benchmarks/benchmark_fsdp.py                                         # two ranks, under a minute on a CPU
    uv run benchmarks/benchmark_fsdp.py --world-size 2 --prefetch 0 1 2 --fsdp ours --out results/
    uv run torchrun --nproc-per-node 2 benchmarks/benchmark_fsdp.py --size xl --dtype fp32 bf16-compute --repeat 2
    uv run torchrun --nproc-per-node 4 benchmarks/benchmark_fsdp.py --size 2.7b --checkpoint full --compile
    torchrun benchmarks/benchmark_fsdp.py --fsdp ours --trace traces/           # a picture: what runs when

Every rank trains on its own random batch of ``--batch-size``; a step takes as long as its slowest rank. Memory is held
against prediction by kind; for every gather of ours the time is measured that its unit had to wait for it.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from cs336_systems.experiments.fully_sharded.measure import BF16_COMPUTE, OURS, FullyShardedCell, measure_fully_sharded
from cs336_systems.experiments.fully_sharded.table import fully_sharded_table
from cs336_systems.experiments.options import (
    check_attention,
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

Implementation = Literal["ours", "torch", "ddp"]
Switch = Literal["off", "on"]


@dataclass(frozen=True)
class Options:
    """What does full sharding buy, and what does it cost?"""

    fsdp: tuple[Implementation, ...] = get_args(Implementation)
    """ours; torch: fully_shard of every block; ddp: our bucketed data parallelism, where it fits."""
    prefetch: tuple[int, ...] = (1,)
    """Units whose weights ours gathers ahead."""
    size: tuple[str, ...] = ("xl",)
    """Named model sizes, as benchmark_model.py takes them."""
    context_length: tuple[int, ...] = (512,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (4,)
    """Sequences per step and rank."""
    dtype: tuple[Literal["fp32", "bf16-compute"], ...] = ("fp32",)
    """fp32; or bf16-compute: fp32 masters, bf16 weights gathered and computed with, fp32 reductions (ddp: autocast)."""
    attention: tuple[str, ...] = ("reference",)
    """Implementations, as benchmark_model.py takes them."""
    checkpoint: tuple[Literal["none", "full"], ...] = ("none",)
    """Activation checkpointing: none, or every block."""
    compile: tuple[Switch, ...] = ("off",)
    """torch.compile of each block and of the loss; --compile alone means on."""
    optimizer: tuple[Literal["reference", "torch-fused"], ...] = ("torch-fused",)
    """AdamW written out, or torch's fused kernel."""
    world_size: tuple[int, ...] | None = None
    """Ranks on this machine, each number a world of its own; by default all GPUs, or two ranks on a CPU. Under torchrun
    it is torchrun's number."""
    warmup: int = 5
    """Steps before the recorded ones."""
    steps: int = 10
    """Recorded steps."""
    repeat: int = 1
    """Times that the whole grid is run, so that implementations are interleaved."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run: cuda with NCCL, cpu with gloo."""
    seed: int = 0
    """Of parameters and tokens."""
    trace: Path | None = None
    """Folder for a recording and a picture of rank 0 per cell (torch.profiler)."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_fsdp.csv); the table then holds earlier rows of that file too."""
    format: Format = "auto"
    """Of the table: auto draws it on a terminal and writes Markdown elsewhere."""
    timeout: float = 900.0
    """Seconds after which a collective, and a cell, is given up."""


def default_options(device: str) -> Options:
    """The defaults on a device; without a GPU they shrink, so that a bare command ends in under a minute."""
    if device == "cuda":
        return Options()
    return Options(device="cpu", size=("tiny",), context_length=(128,), batch_size=(1,), warmup=2, steps=5)


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[FullyShardedCell]:
    """The grid, the implementations of one model next to each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    names = (
        "fsdp",
        "prefetch",
        "size",
        "context_length",
        "batch_size",
        "dtype",
        "attention",
        "checkpoint",
        "optimizer",
    )
    check_given(options, *names)
    check_positive(options, "context_length", "batch_size", "steps", "repeat")
    check_not_negative(options, "prefetch", "warmup")
    check_seed(options.seed, bits=31)
    check_timeout(options.timeout)
    check_dtypes(["autocast-bf16"] if BF16_COMPUTE in options.dtype else [], options.device)
    check_attention(options.attention)
    worlds = resolve_world_sizes(options.world_size, one_rank_per_gpu(options.device))
    sizes = resolved_sizes(options.size, options.context_length)
    sided = [(name, ahead) for name in options.fsdp for ahead in (options.prefetch if name == OURS else (None,))]
    grid = itertools.product(
        worlds,
        sizes,
        options.batch_size,
        options.context_length,
        options.dtype,
        options.attention,
        options.checkpoint,
        options.compile or ("on",),
        options.optimizer,
        sided,
    )
    cells = [
        FullyShardedCell(
            device=options.device,
            fsdp=fsdp,
            size=size,
            batch_size=batch_size,
            context_length=context_length,
            dtype=dtype,
            attention=attention,
            checkpoint=checkpoint,
            compile=compiled,
            prefetch=prefetch,
            optimizer=optimizer,
            world_size=world_size,
            warmup=options.warmup,
            steps=options.steps,
            repeat=0,
            seed=options.seed,
        )
        for (
            world_size,
            size,
            batch_size,
            context_length,
            dtype,
            attention,
            checkpoint,
            compiled,
            optimizer,
            (fsdp, prefetch),
        ) in grid
    ]
    return [replace(cell, repeat=repeat) for repeat in range(options.repeat) for cell in cells]


def describe(cell: FullyShardedCell) -> str:
    """A cell in a few words."""
    ahead = "" if cell.prefetch is None else f" {cell.prefetch} ahead"
    attention = "" if cell.attention == "reference" else f" {cell.attention}"
    checkpoint = "" if cell.checkpoint == "none" else f" checkpoint {cell.checkpoint}"
    compiled = " compiled" if cell.compile == "on" else ""
    return (
        f"{cell.fsdp}{ahead} on {cell.world_size} ranks: {cell.size} batch {cell.batch_size} "
        f"context {cell.context_length} {cell.dtype}{attention}{checkpoint}{compiled} {cell.optimizer}"
    )


BENCHMARK = RankedBenchmark(
    "benchmark_fsdp",
    FullyShardedCell,
    measure_fully_sharded,
    describe,
    (
        *("step", "tokens_per_s", "parameters", "gradients", "optimizer_state", "state_error", "peak_memory", "sent"),
        *("gathers", "late_gathers", "gather_wait", "hidden_share"),
    ),
)


def main() -> int:
    """Parse, check everything that can be checked before running, run; rank 0 presents."""
    options = parse_options()
    note = small_defaults_note(options, default_options, "size", "context_length", "batch_size", "warmup", "steps")

    def present(outcomes: list[Outcome], csv: Path | None) -> None:
        show(fully_sharded_table(read_rows(csv) if csv else outcome_rows(outcomes)), options.format)
        if options.trace is not None:
            draw_traces(outcomes, options.trace, describe)

    benchmark = replace(BENCHMARK, measure=functools.partial(measure_fully_sharded, trace=options.trace))
    return benchmark.run(options, lambda: make_cells(options), present, note)


if __name__ == "__main__":
    exit_with(BENCHMARK.name, main)
