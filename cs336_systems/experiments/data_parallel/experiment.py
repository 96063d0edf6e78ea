"""``benchmark_ddp``: the rungs in one table, with earlier rows of the file; pictures of recordings."""

import functools
from collections.abc import Sequence
from pathlib import Path

from cs336_systems.experiments.data_parallel.cells import DataParallelCell, Options, make_cells
from cs336_systems.experiments.data_parallel.measure import measure_data_parallel
from cs336_systems.experiments.data_parallel.table import data_parallel_table
from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.ranked import draw_traces
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.show import show


def stages(options: Options, cells: Sequence[DataParallelCell], outcomes: list[Outcome]) -> list[Stage]:
    return [Stage(cells, functools.partial(measure_data_parallel, trace=options.trace))]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    """The table, and with ``--trace`` a picture beside each recording."""
    show(data_parallel_table(read_rows(csv) if csv else outcome_rows(outcomes)), options.format)
    if options.trace is not None:
        draw_traces(outcomes, options.trace)


EXPERIMENT = Experiment(
    "benchmark_ddp",
    DataParallelCell,
    make_cells,
    stages,
    present,
    ("step", "backward", "local_step", "exposed", "exposed_share", "hidden_share", "tokens_per_s", "sent"),
)
