"""``benchmark_streaming``: training steps under caps on device and host memory."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import pandas as pd

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.streaming import cells as grid
from cs336_systems.experiments.streaming.cells import Options, StreamingCell
from cs336_systems.experiments.streaming.figure import heatmaps
from cs336_systems.experiments.streaming.measure import CPU_PLANS_FOR, measure
from cs336_systems.experiments.streaming.peers import measure_peer
from cs336_systems.experiments.streaming.profile import profile, recording
from cs336_systems.experiments.streaming.table import STREAMING_TABLE
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.profiling.traces import nsys
from cs336_systems.report.figures import save
from cs336_systems.report.show import show
from cs336_systems.report.tables import Table


def make_cells(options: Options) -> list[StreamingCell]:
    """The grid; raises ValueError for a value that no cell can have, or where nothing can be recorded."""
    if options.profile:
        if options.explain:
            raise ValueError("--explain is of plans: --profile goes without")
        if options.gpu or options.device == "cpu":
            where = f"--gpu {options.gpu}" if options.gpu else "--device cpu"
            raise ValueError(f"--profile records CUDA work, and there is none with {where}")
        if nsys.is_attached():
            raise ValueError("--profile: this process already runs under nsys, one profiler at a time")
        if shutil.which("nsys") is None:
            raise ValueError(f"--profile: {nsys.MISSING}")
    return grid.make_cells(options)


def stages(options: Options, cells: Sequence[StreamingCell], outcomes: list[Outcome]) -> list[Stage]:
    """All cells, with pictures beside the rows if they are asked for; those that are simulated share a process."""
    if options.profile:
        return [Stage(cells, partial(profile, raw=options.raw))]
    pictures = options.out if options.timeline else None
    own, peers = ([cell for cell in cells if bool(cell.peer) is wanted] for wanted in (False, True))
    streamed = Stage(
        own,
        partial(measure, pictures=pictures, explain=options.explain),
        share=lambda cell: cell.simulated_device or cell,
    )
    return [streamed, Stage(peers, measure_peer)]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    if options.profile:
        for outcome in outcomes:
            rows = [{"operations": metric.name, "ms": round(median(metric.samples), 2)} for metric in outcome.metrics]
            if rows:
                caption = f"{outcome.cell}: what kept the device, per step. {recording(outcome.cell, options.raw)}"
                show(Table(caption, pd.DataFrame(rows)), options.format)
        return
    show(STREAMING_TABLE.of(outcome_rows(outcomes)), options.format)
    if options.device == "cpu" and not options.gpu:
        print(f"Plans and what is simulated are those of an {CPU_PLANS_FOR.upper()}, beside steps that ran on a CPU.\n")
    if csv:
        for name, figure in heatmaps(read_rows(csv)):
            save(figure, csv.with_name(f"{csv.stem}_{name}.png"))


EXPERIMENT = Experiment(
    "benchmark_streaming",
    StreamingCell,
    make_cells,
    stages,
    present,
    (
        "recorded_step",
        "tokens_per_s",
        "simulated_tokens_per_s",
        "mfu",
        "simulated_mfu",
        "simulated_over_measured",
        "device_in_use",
    ),
)
