"""``profile_model``: profile each cell in a process of its own, digest each workload, or read an earlier recording."""

import functools
import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import pandas as pd

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.profile import cells as grid
from cs336_systems.experiments.profile import memory_tables
from cs336_systems.experiments.profile.cells import MEMORY, Options, ProfileCell
from cs336_systems.experiments.profile.digest import write_digest
from cs336_systems.experiments.profile.memory_digest import draw_history, write_memory_digest
from cs336_systems.experiments.profile.tables import Profile, class_table, overhead_table, phase_table, rounded
from cs336_systems.harness.fit import check_fit, is_predictable
from cs336_systems.harness.record import Metric
from cs336_systems.harness.sweep import Outcome
from cs336_systems.profiling.memory_history import SNAPSHOTS, read_snapshot, reconstruct
from cs336_systems.profiling.ranges import STEP
from cs336_systems.profiling.recording import HOWS, PROFILERS, Workload, profile_workload, read_trace
from cs336_systems.profiling.traces import nsys
from cs336_systems.profiling.traces.queries import kernel_table, range_table
from cs336_systems.profiling.traces.tables import TraceError
from cs336_systems.report.command_line import complain, os_error
from cs336_systems.report.show import Format, show
from cs336_systems.report.tables import Table, digits

_UNITS = {"gib": "GiB", "mib": "MiB"}


def make_cells(options: Options) -> list[ProfileCell]:
    """The grid; raises ValueError for what no cell can have, or a profiler that cannot run here."""
    if nsys.is_attached():
        raise ValueError(f"--profiler {options.profiler}: this process already runs under nsys, one profiler at a time")
    if options.profiler == "nsys" and options.device == "cpu":
        raise ValueError("--profiler nsys records CUDA work, there is none with --device cpu; use --profiler kineto")
    if options.profiler == "nsys" and shutil.which("nsys") is None:
        raise ValueError(f"--profiler nsys: {nsys.MISSING} (--profiler kineto)")
    options.raw.mkdir(parents=True, exist_ok=True)
    return grid.make_cells(options)


def workload_of(cell: ProfileCell) -> Workload:
    """What the cell times."""
    return Workload(**{field.name: getattr(cell, field.name) for field in fields(Workload)})


def recorded_workload(cell: ProfileCell) -> Workload:
    """What the cell records. torch.profiler starts in a process that is warm already."""
    warmup = min(cell.warmup, 1) if cell.profiler == "kineto" else cell.warmup
    return replace(workload_of(cell), warmup=warmup, steps=cell.recorded_steps)


def trace_path(cell: ProfileCell, raw: Path) -> Path:
    """Where the cell's recording lies."""
    return raw / cell.name / f"{cell.mode}{PROFILERS[cell.profiler]}"


def measure_profile(cell: ProfileCell, *, raw: Path, out: Path | None) -> list[Metric]:
    """Profile one cell: traces are read and digested when all modes are there, memory has its digest at once.

    Raises:
        PredictedOutOfMemory: the eager reference model would need more memory than is free; for the memory profiler,
            running out is a result.
        Unsupported: the device or the attention cannot run the case.
        TraceError: the recording failed or holds no kernels though the cell ran on a GPU.
    """
    if cell.profiler == MEMORY:
        digest = write_memory_digest(cell, cell.mode, out or raw, raw, compiled=cell.device == "cuda")
        return [Metric(name, _UNITS[name.rsplit("_", 1)[1]], [value]) for name, value in digest.figures.items()]
    check_fit(cell, cell.mode, force=not is_predictable(cell))
    return profile_workload(workload_of(cell), recorded_workload(cell), cell.profiler, trace_path(cell, raw))


def stages(options: Options, cells: Sequence[ProfileCell], outcomes: list[Outcome]) -> list[Stage]:
    measure = functools.partial(measure_profile, raw=options.raw, out=options.out)
    return [Stage(cells, measure, lambda cell: 2.0 if cell.mode == "forward" else 6.0)]


def profiles_of(outcomes: list[Outcome], raw: Path) -> list[Profile]:
    """What the successful cells of one workload have measured and recorded.

    Raises:
        TraceError: a trace cannot be read any more.
    """
    profiles = []
    for outcome in outcomes:
        medians = {metric.name: median(metric.samples) for metric in outcome.metrics}
        found = [
            {name.removeprefix(f"{how}_"): ms for name, ms in medians.items() if name.startswith(f"{how}_")}
            for how in HOWS
        ]
        profiles.append(Profile(recorded_workload(outcome.cell), read_trace(trace_path(outcome.cell, raw)), *found))
    return profiles


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> int:
    """A digest for every workload, as far as its cells succeeded; the main figures on stdout.

    Raises:
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
        return 0
    for name, group in itertools.groupby(done, key=lambda outcome: outcome.cell.name):
        own = list(group)
        try:
            profiles = profiles_of(own, options.raw)
            where = own[0].rows[0]["gpu"] or own[0].rows[0]["host"]
            page = write_digest(profiles, name, where, options.profiler, options.out or options.raw / name)
        except TraceError as error:
            return complain(EXPERIMENT.name, f"the digest of {name} could not be written: {error}")
        for profile in profiles:
            show(phase_table(profile), options.format)
        show(class_table(profiles), options.format)
        show(overhead_table(profiles), options.format)
        print(f"{page}: kernels, attention's stages, modules and limits\n")
    return 0


def show_recording(options: Options, path: Path) -> int:
    """What a file of an earlier run says, by the profiler that its name tells; the exit code."""
    if path.name.endswith(SNAPSHOTS):
        return show_snapshot(path, options.out or path.parent, options.format)
    return show_trace(path, options.format)


def show_snapshot(path: Path, out: Path, form: Format) -> int:
    """Draw an allocator snapshot to ``out``; its phases and largest allocations, and its peak as the last line."""
    name = next(path.name.removesuffix(ending) for ending in SNAPSHOTS if path.name.endswith(ending))
    try:
        history = reconstruct(read_snapshot(path))
        pictures = draw_history(history, out, name, name)
    except ValueError as error:
        return complain(EXPERIMENT.name, str(error))
    except OSError as error:
        return complain(EXPERIMENT.name, os_error(error))

    if history.phases:
        show(memory_tables.phase_table(history), form)
    show(memory_tables.allocation_table(history), form)
    print(*pictures, sep="\n", end="\n\n")
    peak_gib = history.peak().n_bytes / memory_tables.GIB
    summary = {"read": str(path), "events": history.n_events, "peak_gib": round(peak_gib, 4)}
    print(json.dumps({"benchmark": EXPERIMENT.name} | summary))
    return 0


def show_trace(path: Path, form: Format) -> int:
    """The ranges and kernels of a trace that was recorded before, and its size as the last line; the exit code."""
    try:
        trace = read_trace(path)
        ranges, kernels = range_table(trace), kernel_table(trace, trace.instances(STEP)).head(20)
    except TraceError as error:
        return complain(EXPERIMENT.name, str(error))
    except OSError as error:
        return complain(EXPERIMENT.name, os_error(error))

    what = "kernels, copies and fills" if trace.has_gpu else "CPU operators"
    show(Table(f"Ranges of {path}, per step.", rounded(ranges, 4)), form)
    show(Table(f"The 20 {what} that take most of a step.", rounded(kernels, 4)), form)
    summary = {"read": str(path), "ops": len(trace.ops), "ranges": len(trace.ranges)}
    print(json.dumps({"benchmark": EXPERIMENT.name} | summary))
    return 0


EXPERIMENT = Experiment(
    "profile_model",
    ProfileCell,
    make_cells,
    stages,
    present,
    (
        *("annotation_ratio", "recording_ratio", "unprofiled_step", "busy", "idle", "matmul_share"),
        *("peak_gib", "eager_block_activations_mib"),
    ),
)
