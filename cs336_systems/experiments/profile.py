"""Where does a step of this model spend its time, or its memory?

Time is recorded by nsys or by kineto (torch.profiler), after plain and annotated steps of the same process
(``profiling/recording.py``); ``profile_digest.py`` says what the traces show. Memory is the allocator's log of one pass
and what a block keeps for backward (``memory_digest.py``). CSVs and pictures are written; the tables are printed.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODES
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.options import TimedCase, TrainingRun, training_cells
from cs336_systems.report.command_line import complain
from cs336_systems.report.tables import Table, digits, show

if TYPE_CHECKING:
    from cs336_systems.experiments.profile_digest import Profile
    from cs336_systems.harness.record import Metric
    from cs336_systems.harness.sweep import Outcome
    from cs336_systems.profiling.recording import Workload

NAME = "profile_model"

MEMORY = "memory"
"""The profiler that records the allocator and not time."""


def file_stem(case: TrainingCase) -> str:
    """A case in file names: only what differs from the plain case is named after the precision."""
    short = {"torch-fused": "fused", "fused": "fused-adamw"}
    extras = [short.get(extra, extra.replace(" ", "-")) for extra in case.extras]
    return "-".join([case.config.name, f"b{case.batch_size}", f"c{case.context_length}", case.dtype, *extras])


def memory_stem(case: TrainingCase, mode: str) -> str:
    """The first words of the names of a memory profile's files."""
    return f"memory-{file_stem(case)}-{mode}"


@dataclass(frozen=True)
class ProfileCell(TimedCase):
    """One mode of one workload under one profiler; the fields are columns."""

    dtype: str = like(TrainingCase, "dtype", asked=("fp32",))
    warmup: int = like(TimedCase, "warmup", help="Steps before each round of timed or recorded ones.")
    steps: int = like(TimedCase, "steps", asked=5, help="Timed steps, plain and annotated, in each of two rounds.")
    profiler: str = option(
        "kineto",
        "Time: nsys (NVIDIA Nsight Systems) or kineto (torch.profiler). Memory: the allocator's log.",
        values=("nsys", "kineto", MEMORY),
        several=False,
    )
    mode: str = option(
        "step",
        "forward: inference, without gradients; backward: forward and backward; step: the whole training step.",
        values=MODES,
        asked=("forward", "step"),
    )
    recorded_steps: int = option(3, "Steps in the trace.", several=False, sign="positive")

    @property
    def variant(self) -> str:
        return self.profiler

    @property
    def name(self) -> str:
        """The workload, whatever its mode, in file names."""
        return f"{file_stem(self)}-{self.profiler}"

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"


@dataclass(frozen=True)
class Asked(TrainingRun):
    """Where does a step of this model spend its time, or its memory?"""

    CPU_DEFAULTS: ClassVar = TrainingRun.CPU_DEFAULTS | {"warmup": 1, "steps": 3, "recorded_steps": 2}
    raw: Path = Path("profiles/raw")
    """Folder for the recorded files; CSVs and pictures go there too, unless --out names a folder."""


Options: Any = options_of(ProfileCell, Asked)


def make_cells(options: Any) -> list[ProfileCell]:
    """The modes of each workload next to each other, once the folder for recordings is there.

    Raises:
        ValueError: a value that no cell can have, or a profiler that cannot run on this machine.
        OSError: the folder cannot be made.
    """
    from cs336_systems.profiling.traces import nsys

    if options.profiler == "nsys" and options.device == "cpu":
        raise ValueError("--profiler nsys records CUDA work, there is none with --device cpu; use --profiler kineto")
    if options.accumulate != (1,):
        given = " ".join(map(str, options.accumulate))
        raise ValueError(f"a profile is that of one micro-batch, got --accumulate {given}")
    if "on" in options.cuda_graph:
        raise ValueError("--cuda-graph on: a captured step has no phases or modules that a profile could show")
    cells = training_cells(ProfileCell, options, inner=[{"mode": mode} for mode in dict.fromkeys(options.mode)])
    if nsys.is_attached():
        raise ValueError(f"--profiler {options.profiler}: this process already runs under nsys, one profiler at a time")
    if options.profiler == "nsys" and shutil.which("nsys") is None:
        raise ValueError(f"--profiler nsys: {nsys.MISSING} (--profiler kineto)")
    options.raw.mkdir(parents=True, exist_ok=True)
    return cells


def workload_of(cell: ProfileCell, *, recorded: bool = False) -> Workload:
    """The workload that the cell times, or the one that it records; torch.profiler starts in a warm process."""
    from cs336_systems.profiling.recording import Workload

    workload = Workload(**{field.name: getattr(cell, field.name) for field in fields(Workload)})
    if not recorded:
        return workload
    warmup = min(cell.warmup, 1) if cell.profiler == "kineto" else cell.warmup
    return replace(workload, warmup=warmup, steps=cell.recorded_steps)


def trace_path(cell: ProfileCell, raw: Path) -> Path:
    """The file of the cell's recording."""
    from cs336_systems.profiling.recording import PROFILERS

    return raw / cell.name / f"{cell.mode}{PROFILERS[cell.profiler]}"


def measure_profile(cell: ProfileCell, *, raw: Path, out: Path | None) -> list[Metric]:
    """Profile one cell: traces are digested when all modes are there, memory at once.

    Raises:
        PredictedOutOfMemory: the cell would not fit; for the memory profiler running out is a result.
        Unsupported: the device or the attention cannot run the case.
        TraceError: the recording failed or holds no kernels though the cell ran on a GPU.
    """
    from cs336_systems.harness.memory import check_fit, is_predictable

    if cell.profiler == MEMORY:
        from cs336_systems.experiments.memory_digest import write_memory_digest

        return write_memory_digest(cell, cell.mode, out or raw, raw)
    from cs336_systems.profiling.recording import profile_workload

    check_fit(cell, cell.mode, force=not is_predictable(cell))
    return profile_workload(workload_of(cell), workload_of(cell, recorded=True), cell.profiler, trace_path(cell, raw))


def _profile_of(outcome: Outcome, raw: Path) -> Profile:
    """The profile of a successful cell; raises TraceError if its trace cannot be read any more."""
    from cs336_systems.experiments.profile_digest import Profile
    from cs336_systems.profiling.recording import HOWS, read_trace

    medians = {metric.name: median(metric.samples) for metric in outcome.metrics}
    found = [
        {name.removeprefix(f"{how}_"): ms for name, ms in medians.items() if name.startswith(f"{how}_")} for how in HOWS
    ]
    return Profile(workload_of(outcome.cell, recorded=True), read_trace(trace_path(outcome.cell, raw)), *found)


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> int:
    """The tables on stdout; of traces also the files of every workload, as far as its cells succeeded.

    Raises:
        OSError: a file cannot be written.
    """
    from cs336_systems.experiments.profile_digest import class_table, limits_table, phase_table, write_digest
    from cs336_systems.profiling.traces.tables import TraceError

    done = [outcome for outcome in outcomes if outcome.status == "ok"]
    for name, group in itertools.groupby(done, key=lambda outcome: outcome.cell.name):
        own = list(group)
        if options.profiler == MEMORY:
            folder = options.out or options.raw
            lines = [(each.cell.mode, m.name, digits(m.samples[0]), m.unit) for each in own for m in each.metrics]
            tables = [Table.of("", ("mode", "metric", "figure", "unit"), lines)]
            what = ", ".join(f"{memory_stem(each.cell, each.cell.mode)}*" for each in own)
        else:
            recordings = options.raw / name
            folder, what = options.out or recordings, f"CSVs and pictures of {name}; recordings: {recordings}"
            try:
                profiles = [_profile_of(outcome, options.raw) for outcome in own]
                write_digest(profiles, name, own[0].rows[0]["gpu"] or own[0].rows[0]["host"], folder)
            except TraceError as error:
                return complain(NAME, f"the digest of {name} could not be written: {error}")
            tables = [*map(phase_table, profiles), class_table(profiles)]
            tables += [limits_table(profiles)] if profiles[0].trace.has_gpu else []
        for table in tables:
            show(table, options.format)
        print(f"{folder}: {what}\n")
    return 0


EXPERIMENT = Experiment(
    NAME,
    ProfileCell,
    make_cells,
    lambda options, cells, outcomes: [
        Stage(cells, functools.partial(measure_profile, raw=options.raw, out=options.out))
    ],
    present,
    (
        *("annotation_ratio", "recording_ratio", "unprofiled_step", "busy", "idle", "matmul_share"),
        *("peak_gib", "eager_block_activations_mib"),
    ),
    options=Options,
)
