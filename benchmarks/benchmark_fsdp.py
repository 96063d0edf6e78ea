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
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from cs336_systems.attention.dispatch import IMPLEMENTATIONS
from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.distributed.process_group import launched_world_size
from cs336_systems.measurement.fully_sharded import BF16_COMPUTE, OURS, FullyShardedCell, measure_fully_sharded
from cs336_systems.measurement.ranks import reports, run_ranked_sweep
from cs336_systems.measurement.record import RowFile, read_rows
from cs336_systems.measurement.sweep import Outcome, cell_columns, outcome_rows
from cs336_systems.measurement.traces import kineto
from cs336_systems.measurement.traces.tables import TraceError
from cs336_systems.report.console import Format, check_device, complain, exit_with, finish, parse_for_device, show
from cs336_systems.report.fully_sharded import fully_sharded_table
from cs336_systems.report.timeline import draw_timeline
from cs336_systems.training.precision import unsupported_reason

BENCHMARK = "benchmark_fsdp"
HEADLINES = (
    *("step", "tokens_per_s", "parameters", "gradients", "optimizer_state", "state_error", "peak_memory", "sent"),
    *("gathers", "late_gathers", "gather_wait", "hidden_share"),
)
"""Metrics of the JSON line."""

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


def world_sizes(options: Options) -> tuple[int, ...]:
    """Which worlds to measure.

    Raises:
        ValueError: the launcher has started another number of ranks than was asked for.
    """
    present = launched_world_size()
    if present is None:
        default = torch.cuda.device_count() if options.device == "cuda" else 2
        return options.world_size if options.world_size is not None else (default,)
    if options.world_size not in (None, (present,)):
        asked = " ".join(map(str, options.world_size or ()))
        raise ValueError(f"--world-size {asked}: the launcher has started {present} ranks")
    return (present,)


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
    sets: dict[str, tuple[Any, ...]] = {name: getattr(options, name) for name in names}
    sets["world_size"] = world_sizes(options)
    for name, values in sets.items():
        if not values:
            raise ValueError(f"--{name.replace('_', '-')} needs at least one value, got none")
    for name in ("context_length", "batch_size", "world_size"):
        if bad := [value for value in sets[name] if value < 1]:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {bad[0]}")
    if min(options.prefetch) < 0:
        raise ValueError(f"--prefetch must not be negative, got {min(options.prefetch)}")
    if options.steps < 1 or options.warmup < 0 or options.repeat < 1:
        raise ValueError(
            "--steps and --repeat must be positive and --warmup not negative, "
            f"got {options.steps}, {options.repeat} and {options.warmup}"
        )
    if not 0 <= options.seed < 2**31:
        raise ValueError(f"--seed must lie in 0..2^31-1, got {options.seed}")
    if not 0 < options.timeout <= 1e6:
        raise ValueError(f"--timeout must be positive and at most 1e6 seconds, got {options.timeout:g}")
    if BF16_COMPUTE in options.dtype and (
        reason := unsupported_reason(PRECISIONS["autocast-bf16"], torch.device(options.device))
    ):
        raise ValueError(f"--dtype {BF16_COMPUTE}: {reason}")
    for attention in options.attention:
        if attention not in IMPLEMENTATIONS:
            raise ValueError(f"--attention {attention}: known are {', '.join(IMPLEMENTATIONS)}")
    sizes = [resolve_size(size).name for size in options.size]
    for size, context_length in itertools.product(sizes, options.context_length):
        resolve_size(size).at_context(context_length)
    sided = [(name, ahead) for name in options.fsdp for ahead in (options.prefetch if name == OURS else (None,))]
    grid = itertools.product(
        sets["world_size"],
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


def draw_traces(outcomes: list[Outcome], folder: Path) -> list[str]:
    """A picture beside each recording, of its last step; a sentence for each, or on why there is none."""
    notes = []
    for cell in (outcome.cell for outcome in outcomes if outcome.status == "ok"):
        picture = folder / f"{cell.name}.png"
        try:
            trace = kineto.read(folder / f"{cell.name}.json.gz")
            draw_timeline(trace, ["forward", "backward", "optimizer"], describe(cell), picture)
        except (TraceError, OSError) as error:
            notes.append(f"no picture of {describe(cell)}: {error}")
            continue
        limits = "" if trace.has_gpu else " (no GPU sections: a CPU's trace shows calls, not what gloo's threads send)"
        notes.append(f"{picture}{limits}")
    return notes


def main() -> int:
    """Parse, check everything that can be checked before running, run; rank 0 prints."""
    options = parse_options()
    csv = options.out / f"{BENCHMARK}.csv" if options.out else None
    try:
        cells = make_cells(options)
        row_file = RowFile(csv, cell_columns(FullyShardedCell)) if csv and reports() else None
    except ValueError as error:
        return complain(BENCHMARK, str(error))
    except OSError as error:
        return complain(BENCHMARK, f"{error.filename}: {error.strerror}")
    if reports() and options.device == "cpu":
        print("On a CPU the defaults shrink: the tiny model, batch 1, context 128, few steps.", file=sys.stderr)
    try:
        outcomes = run_ranked_sweep(
            BENCHMARK,
            cells,
            functools.partial(measure_fully_sharded, trace=options.trace),
            world_size=None,
            device=options.device,
            row_file=row_file,
            timeout_s=options.timeout,
            describe=describe,
        )
        if not reports():
            return 0
        show(fully_sharded_table(read_rows(csv) if csv else outcome_rows(outcomes)), options.format)
    except (ValueError, OSError) as error:
        return complain(BENCHMARK, str(error))
    if options.trace is not None:
        for note in draw_traces(outcomes, options.trace):
            print(note, file=sys.stderr)
    return finish(BENCHMARK, outcomes, describe, HEADLINES, csv)


if __name__ == "__main__":
    exit_with(BENCHMARK, main)
