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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.distributed.process_group import launched_world_size
from cs336_systems.measurement.data_parallel import SIZED, DataParallelCell, measure_data_parallel
from cs336_systems.measurement.ranks import reports, run_ranked_sweep
from cs336_systems.measurement.record import RowFile, read_rows
from cs336_systems.measurement.sweep import Outcome, cell_columns, outcome_rows
from cs336_systems.measurement.traces import kineto
from cs336_systems.measurement.traces.tables import TraceError
from cs336_systems.report.console import Format, check_device, complain, exit_with, finish, parse_for_device, show
from cs336_systems.report.data_parallel import data_parallel_table
from cs336_systems.report.timeline import draw_timeline
from cs336_systems.training.precision import unsupported_reason

BENCHMARK = "benchmark_ddp"
HEADLINES = ("step", "backward", "local_step", "exposed", "exposed_share", "hidden_share", "tokens_per_s", "sent")
"""Metrics of the JSON line."""

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


def make_cells(options: Options) -> list[DataParallelCell]:
    """The grid, the rungs of one model next to each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    worlds = world_sizes(options)
    sets: dict[str, tuple[Any, ...]] = {
        name: getattr(options, name)
        for name in ("ddp", "bucket_size_mb", "communication_dtype", "size", "context_length", "batch_size", "dtype")
    } | {"optimizer": options.optimizer, "world_size": worlds}
    for name, values in sets.items():
        if not values:
            raise ValueError(f"--{name.replace('_', '-')} needs at least one value, got none")
    for name in ("bucket_size_mb", "context_length", "batch_size", "world_size"):
        if bad := [value for value in sets[name] if not value > 0]:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {bad[0]:g}")
    if options.steps < 1 or options.warmup < 0:
        raise ValueError(f"--steps must be positive and --warmup not negative, got {options.steps}, {options.warmup}")
    if not 0 <= options.seed < 2**31:
        raise ValueError(f"--seed must lie in 0..2^31-1, got {options.seed}")
    if not 0 < options.timeout <= 1e6:
        raise ValueError(f"--timeout must be positive and at most 1e6 seconds, got {options.timeout:g}")
    for dtype in options.dtype:
        if reason := unsupported_reason(PRECISIONS[dtype], torch.device(options.device)):
            raise ValueError(f"--dtype {dtype}: {reason}")
    sizes = [resolve_size(size).name for size in options.size]
    for size, context_length in itertools.product(sizes, options.context_length):
        resolve_size(size).at_context(context_length)
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


def draw_traces(outcomes: list[Outcome], folder: Path) -> list[str]:
    """A picture beside each recording, of its last step; a sentence for each, or on why there is none."""
    notes = []
    for cell in (outcome.cell for outcome in outcomes if outcome.status == "ok"):
        path = folder / f"{cell.name}.json.gz"
        picture = folder / f"{cell.name}.png"
        try:
            trace = kineto.read(path)
            draw_timeline(trace, ["forward", "backward", "optimizer"], describe(cell), picture)
        except (TraceError, OSError) as error:
            notes.append(f"no picture of {describe(cell)}: {error}")
            continue
        limits = "" if trace.has_gpu else " (no GPU sections; what gloo sends shows as ranges of its threads)"
        notes.append(f"{picture}{limits}")
    return notes


def small_defaults_note(options: Options) -> str:
    """A sentence that names the options which stand at the smaller defaults of a machine without a GPU, if any do."""
    if options.device != "cpu":
        return ""
    small, usual = default_options("cpu"), default_options("cuda")

    def shown(value: Any) -> str:
        return str(value[0] if isinstance(value, tuple) else value)

    names = ("size", "context_length", "batch_size", "warmup", "steps")
    shrunk = [name for name in names if getattr(options, name) == getattr(small, name)]
    parts = [f"--{name.replace('_', '-')} {shown(getattr(small, name))}" for name in shrunk]
    usually = [shown(getattr(usual, name)) for name in shrunk]
    return f"On a CPU the defaults shrink: {', '.join(parts)} (on a GPU {', '.join(usually)})." if parts else ""


def main() -> int:
    """Parse, check everything that can be checked before running, run; rank 0 prints."""
    options = parse_options()
    csv = options.out / f"{BENCHMARK}.csv" if options.out else None
    try:
        cells = make_cells(options)
        row_file = RowFile(csv, cell_columns(DataParallelCell)) if csv and reports() else None
    except ValueError as error:
        return complain(BENCHMARK, str(error))
    except OSError as error:
        return complain(BENCHMARK, f"{error.filename}: {error.strerror}")
    if reports() and (note := small_defaults_note(options)):
        print(note, file=sys.stderr)
    try:
        outcomes = run_ranked_sweep(
            BENCHMARK,
            cells,
            functools.partial(measure_data_parallel, trace=options.trace),
            world_size=None,
            device=options.device,
            row_file=row_file,
            timeout_s=options.timeout,
            describe=describe,
        )
        if not reports():
            return 0
        show(data_parallel_table(read_rows(csv) if csv else outcome_rows(outcomes)), options.format)
    except (ValueError, OSError) as error:
        return complain(BENCHMARK, str(error))
    if options.trace is not None:
        for note in draw_traces(outcomes, options.trace):
            print(note, file=sys.stderr)
    return finish(BENCHMARK, outcomes, describe, HEADLINES, csv)


if __name__ == "__main__":
    exit_with(BENCHMARK, main)
