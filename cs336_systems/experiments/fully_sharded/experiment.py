"""``benchmark_fsdp``: the implementations in one table, with earlier rows of the file; pictures of recordings."""

import functools
from collections.abc import Sequence
from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.fully_sharded.cells import FullyShardedCell, Options, make_cells
from cs336_systems.experiments.fully_sharded.measure import measure_fully_sharded
from cs336_systems.experiments.fully_sharded.table import fully_sharded_table
from cs336_systems.experiments.ranked import draw_traces
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.show import show


def stages(options: Options, cells: Sequence[FullyShardedCell], outcomes: list[Outcome]) -> list[Stage]:
    return [Stage(cells, functools.partial(measure_fully_sharded, trace=options.trace))]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    """The table, and with ``--trace`` a picture beside each recording."""
    show(fully_sharded_table(read_rows(csv) if csv else outcome_rows(outcomes)), options.format)
    if options.trace is not None:
        draw_traces(outcomes, options.trace)


EXPERIMENT = Experiment(
    "benchmark_fsdp",
    FullyShardedCell,
    make_cells,
    stages,
    present,
    (
        *("step", "tokens_per_s", "parameters", "gradients", "optimizer_state", "state_error", "peak_memory", "sent"),
        *("gathers", "late_gathers", "gather_wait", "hidden_share"),
    ),
)
