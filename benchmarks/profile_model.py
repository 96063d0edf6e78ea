"""Where does a step of this model spend its time, or its memory? Kernels, phases, idle time; allocations, residuals.

    uv run benchmarks/profile_model.py --profiler kineto                  # anywhere; on a CPU it shows operators
    uv run benchmarks/profile_model.py --profiler nsys --size small large --context-length 128 512 --out digests/
    uv run benchmarks/profile_model.py --profiler memory --size 2.7b --context-length 2048 --mode step
    uv run benchmarks/profile_model.py --read profiles/raw/small-b4-c512-fp32-nsys/step.sqlite

nsys and kineto (torch.profiler) are read into the same tables and give the same digest; memory watches the allocator
and accounts for what a block keeps for backward. Each cell, one mode of one workload, runs in a process of its own:
plain and annotated steps in turn, so that the cost of annotation is known, then the recorded ones. Raw files go to
profiles/raw/; --out receives a page (Markdown), CSVs and pictures per workload. Profilers contend for the device, so
each run uses one.
"""

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Literal

import pandas as pd
import torch
from rich.console import Console

from cs336_systems.config import PRECISIONS
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.costs.memory import peak_memory
from cs336_systems.experiments.options import (
    check_attention,
    check_dtypes,
    check_given,
    check_not_negative,
    check_positive,
    check_seed,
    check_timeout,
    resolved_sizes,
)
from cs336_systems.experiments.profile.digest import write_digest
from cs336_systems.experiments.profile.memory_digest import write_memory_digest
from cs336_systems.experiments.profile.tables import Profile, class_table, overhead_table, phase_table
from cs336_systems.harness.memory import cublas_workspace_bytes, free_bytes
from cs336_systems.harness.process import PredictedOutOfMemory, Unsupported
from cs336_systems.harness.record import Metric, RowFile
from cs336_systems.harness.sweep import Outcome, cell_columns, run_sweep
from cs336_systems.profiling.ranges import STEP
from cs336_systems.profiling.recording import HOWS, PROFILERS, profile_workload, read_trace
from cs336_systems.profiling.traces import nsys
from cs336_systems.profiling.traces.queries import kernel_table, range_table
from cs336_systems.profiling.traces.tables import TraceError
from cs336_systems.profiling.workload import Workload
from cs336_systems.report.console import Format, check_device, complain, exit_with, finish, parse_for_device, show
from cs336_systems.report.tables import Table, digits
from cs336_systems.training import unsupported_attention

BENCHMARK = "profile_model"
HEADLINES = (
    *("annotation_ratio", "recording_ratio", "unprofiled_step", "busy", "idle", "matmul_share"),
    *("peak_gib", "eager_block_activations_mib"),
)
"""Metrics of the JSON line."""

MEMORY = "memory"
"""The profiler that is no recorder of time."""

Dtype = Literal["fp32", "tf32", "bf16", "autocast-bf16", "autocast-fp16"]
Mode = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Options:
    """Where does a step of this model spend its time, or its memory?"""

    profiler: Literal["nsys", "kineto", "memory"] = "kineto"
    """Time: nsys (NVIDIA Nsight Systems, must be installed) or kineto (torch.profiler). Memory: the allocator's log."""
    size: tuple[str, ...] = ("small",)
    """Named model sizes, as benchmark_model.py takes them."""
    context_length: tuple[int, ...] = (512,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (4,)
    """Sequences per step."""
    mode: tuple[Mode, ...] = ("forward", "step")
    """forward: inference, without gradients; backward: forward and backward; step: the whole training step."""
    dtype: tuple[Dtype, ...] = ("fp32",)
    """How numbers are stored and multiplied."""
    attention: tuple[str, ...] = ("reference",)
    """Implementations; only the reference calls the products and the softmax whose stages are compared."""
    compile: tuple[Literal["off", "on"], ...] = ("off",)
    """torch.compile of each block, which is then one range, and of the loss; --compile alone means on."""
    checkpoint: tuple[str, ...] = ("none",)
    """Activation checkpointing policies, as benchmark_model.py takes them."""
    optimizer: tuple[Literal["reference", "torch-fused"], ...] = ("reference",)
    """AdamW written out, or torch's fused kernel."""
    warmup: int = 5
    """Steps before those that are timed or recorded, every time."""
    steps: int = 5
    """Timed steps, plain and annotated, in each of two rounds."""
    recorded_steps: int = 3
    """Steps in the trace."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    seed: int = 0
    """Of parameters and tokens."""
    raw: Path = Path("profiles/raw")
    """Folder for the recorded files."""
    out: Path | None = None
    """Folder for the digests and for the rows (profile_model.csv); by default the digests lie beside the raw files."""
    read: Path | None = None
    """Run nothing; show what an nsys export (.sqlite) or a Chrome trace (.json, .json.gz) of annotated steps holds."""
    format: Format = "auto"
    """Of the tables: auto draws them on a terminal and writes Markdown elsewhere."""
    timeout: float = 900.0
    """Seconds after which a cell is killed."""


@dataclass(frozen=True)
class ProfileCell:
    """One mode of one workload under one profiler; the fields are columns."""

    profiler: str
    device: str
    size: str
    batch_size: int
    context_length: int
    dtype: str
    attention: str
    compile: str
    checkpoint: str
    optimizer: str
    mode: str
    warmup: int
    steps: int
    recorded_steps: int
    seed: int

    @property
    def variant(self) -> str:
        return self.profiler

    @property
    def workload(self) -> Workload:
        """What the cell times."""
        return Workload(**{f.name: getattr(self, f.name) for f in fields(Workload)})

    @property
    def recorded(self) -> Workload:
        """What the cell records. torch.profiler starts in a process that is warm already."""
        warmup = min(self.warmup, 1) if self.profiler == "kineto" else self.warmup
        return replace(self.workload, warmup=warmup, steps=self.recorded_steps)

    @property
    def name(self) -> str:
        """Of the workload, whatever its mode, in file names."""
        parts = [self.size, f"b{self.batch_size}", f"c{self.context_length}", self.dtype]
        parts += [self.attention] if self.attention != "reference" else []
        parts += ["compiled"] if self.compile == "on" else []
        parts += [f"checkpoint-{self.checkpoint}"] if self.checkpoint != "none" else []
        parts += ["fused"] if self.optimizer == "torch-fused" else []
        return "-".join([*parts, self.profiler])

    def trace_path(self, raw: Path) -> Path:
        """Where the cell's recording lies."""
        return raw / self.name / f"{self.mode}{PROFILERS[self.profiler]}"


def default_options(device: str) -> Options:
    """The defaults on a device; without a GPU they shrink, so that a bare command ends in well under a minute."""
    if device == "cuda":
        return Options()
    return Options(
        device="cpu", size=("tiny",), context_length=(128,), batch_size=(1,), warmup=1, steps=3, recorded_steps=2
    )


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[ProfileCell]:
    """The grid, the modes of one workload next to each other.

    Raises:
        ValueError: a value that no cell can have, or a profiler that cannot run here.
    """
    check_device(options.device)
    if nsys.is_attached():
        raise ValueError(f"--profiler {options.profiler}: this process already runs under nsys, one profiler at a time")
    if options.profiler == "nsys" and options.device == "cpu":
        raise ValueError("--profiler nsys records CUDA work, there is none with --device cpu; use --profiler kineto")
    if options.profiler == "nsys" and shutil.which("nsys") is None:
        raise ValueError(f"--profiler nsys: {nsys.MISSING} (--profiler kineto)")
    names = ("size", "context_length", "batch_size", "mode", "dtype", "attention", "checkpoint", "optimizer")
    check_given(options, *names)
    check_positive(options, "steps", "recorded_steps", "context_length", "batch_size")
    check_not_negative(options, "warmup")
    check_seed(options.seed)
    check_timeout(options.timeout)
    check_dtypes(options.dtype, options.device)
    check_attention(options.attention)
    policies = dict.fromkeys(canonical_policy(policy) for policy in options.checkpoint)
    sizes = resolved_sizes(options.size, options.context_length)
    grid = itertools.product(
        sizes,
        options.batch_size,
        options.context_length,
        options.dtype,
        options.attention,
        options.compile or ("on",),
        policies,
        options.optimizer,
        dict.fromkeys(options.mode),
    )
    counted = {name: getattr(options, name) for name in ("warmup", "steps", "recorded_steps", "seed")}
    return [ProfileCell(options.profiler, options.device, *values, **counted) for values in grid]


def measure_profile(cell: ProfileCell, *, raw: Path, out: Path | None) -> list[Metric]:
    """Profile one cell: traces are read and digested when all modes are there, memory has its digest at once.

    Raises:
        PredictedOutOfMemory: the eager reference model would need more memory than is free.
        Unsupported: the attention cannot serve this model.
        TraceError: the recording failed or holds no kernels though the cell ran on a GPU.
    """
    if reason := unsupported_attention(cell.workload.setup):
        raise Unsupported(f"attention {cell.attention}: {reason}")
    if cell.profiler == MEMORY:
        digest = write_memory_digest(
            cell.workload.setup, cell.batch_size, cell.mode, out or raw, raw, compiled=cell.device == "cuda"
        )
        units = {"gib": "GiB", "mib": "MiB"}
        return [Metric(name, units[name.rsplit("_", 1)[1]], [value]) for name, value in digest.figures.items()]
    _check_memory(cell)
    return profile_workload(cell.workload, cell.recorded, cell.profiler, cell.trace_path(raw))


def _check_memory(cell: ProfileCell) -> None:
    """Raise PredictedOutOfMemory if the eager reference model will not fit."""
    if cell.compile == "on" or cell.attention != "reference":
        return
    device = torch.device(cell.device)
    needed = peak_memory(
        cell.workload.config,
        cell.batch_size,
        cell.context_length,
        PRECISIONS[cell.dtype],
        cell.mode,
        optimizer=cell.optimizer,
        checkpoint=cell.checkpoint,
        device_type=cell.device,
        workspace_bytes=cublas_workspace_bytes(device),
    ).n_bytes
    if needed > (free := free_bytes(device)):
        raise PredictedOutOfMemory(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def profiles_of(outcomes: list[Outcome], raw: Path) -> list[Profile]:
    """What the successful cells of one workload have measured and recorded.

    Raises:
        TraceError: a trace cannot be read any more.
    """
    profiles = []
    for outcome in outcomes:
        medians = {metric.name: median(metric.samples) for metric in outcome.metrics}
        found = [
            {name.removeprefix(how): value for name, value in medians.items() if name.startswith(how)}
            for how in (f"{how}_" for how in HOWS)
        ]
        profiles.append(Profile(outcome.cell.recorded, read_trace(outcome.cell.trace_path(raw)), *found))
    return profiles


def describe(cell: ProfileCell) -> str:
    """A cell in a few words, for the progress display."""
    return f"{cell.name} {cell.mode}"


def write_digests(options: Options, outcomes: list[Outcome]) -> None:
    """A digest for every workload, as far as its cells succeeded; the main figures on stdout.

    Raises:
        TraceError: a trace cannot be read any more.
        OSError: a digest cannot be written.
    """
    done = [outcome for outcome in outcomes if outcome.status == "ok"]
    if options.profiler == MEMORY:
        figures = [
            {"mode": outcome.cell.mode, "metric": metric.name, "figure": digits(metric.samples[0]), "unit": metric.unit}
            for outcome in done
            for metric in outcome.metrics
        ]
        if figures:
            caption = f"Main figures; the pages are in {options.out or options.raw}."
            show(Table(caption, pd.DataFrame(figures)), options.format)
        return
    for name, group in itertools.groupby(done, key=lambda outcome: outcome.cell.name):
        own = list(group)
        profiles = profiles_of(own, options.raw)
        where = own[0].rows[0]["gpu"] or own[0].rows[0]["host"]
        page = write_digest(profiles, name, where, options.profiler, options.out or options.raw / name)
        for profile in profiles:
            show(phase_table(profile), options.format)
        show(class_table(profiles), options.format)
        show(overhead_table(profiles), options.format)
        print(f"{page}: kernels, attention's stages, modules and limits\n")


def show_trace(path: Path, form: Format) -> int:
    """The ranges and kernels of a trace that was recorded before, and its size as the last line."""
    trace = read_trace(path)

    def rounded(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.map(lambda cell: f"{cell:.4g}" if isinstance(cell, float) else str(cell))

    what = "kernels, copies and fills" if trace.has_gpu else "CPU operators"
    show(Table(f"Ranges of {path}, per step.", rounded(range_table(trace))), form)
    kernels = kernel_table(trace, trace.instances(STEP)).head(20)
    show(Table(f"The 20 {what} that take most of a step.", rounded(kernels)), form)
    print(json.dumps({"benchmark": BENCHMARK, "read": str(path), "ops": len(trace.ops), "ranges": len(trace.ranges)}))
    return 0


def main() -> int:
    """Parse, check everything that can be checked before running, run, print."""
    options = parse_options()
    try:
        if options.read is not None:
            return show_trace(options.read, options.format)
        cells = make_cells(options)
        csv = options.out / f"{BENCHMARK}.csv" if options.out else None
        row_file = RowFile(csv, cell_columns(ProfileCell)) if csv else None
        options.raw.mkdir(parents=True, exist_ok=True)
    except (ValueError, TraceError) as error:
        return complain(BENCHMARK, str(error))
    except OSError as error:
        return complain(BENCHMARK, f"{error.filename}: {error.strerror}")
    measure: Callable[[ProfileCell], list[Metric]] = functools.partial(
        measure_profile, raw=options.raw, out=options.out
    )
    outcomes: list[Outcome] = []
    sweep = run_sweep(
        BENCHMARK,
        cells,
        measure,
        row_file=row_file,
        timeout_s=options.timeout,
        describe=describe,
        cost=lambda cell: 2.0 if cell.mode == "forward" else 6.0,
        console=Console(stderr=True),
    )
    try:
        outcomes.extend(sweep)
    except OSError as error:
        return complain(BENCHMARK, f"rows could not be written to {csv}: {error.strerror}; every earlier row is there")
    try:
        write_digests(options, outcomes)
    except (TraceError, OSError) as error:
        return complain(BENCHMARK, f"the digest could not be written: {error}")
    return finish(BENCHMARK, outcomes, describe, HEADLINES, csv)


if __name__ == "__main__":
    exit_with(BENCHMARK, main)
