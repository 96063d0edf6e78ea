"""``benchmark_sharded_optimizer``: time against plain data parallelism, memory against its prediction."""

import functools
from collections.abc import Sequence
from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.ranked import Effort
from cs336_systems.experiments.sharded_optimizer.cells import Options, ShardingCell, make_cells
from cs336_systems.experiments.sharded_optimizer.measure import measure_sharding
from cs336_systems.experiments.sharded_optimizer.table import MEMORY, TIMES, memory_figure
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show


def stages(options: Options, cells: Sequence[ShardingCell], outcomes: list[Outcome]) -> list[Stage]:
    """All cells, with as much warm-up as is asked for."""
    return [Stage(cells, functools.partial(measure_sharding, effort=Effort.of(options)))]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    """The tables of time and of memory, and the memory of all rows of the file as a figure."""
    rows = outcome_rows(outcomes)
    show(TIMES.of(rows), options.format)
    show(MEMORY.of(rows), options.format)
    if csv:
        save(memory_figure(read_rows(csv)), csv.with_suffix(".png"))


EXPERIMENT = Experiment(
    "benchmark_sharded_optimizer",
    ShardingCell,
    make_cells,
    stages,
    present,
    (
        *("forward", "backward", "optimizer", "step"),
        *("after_step_optimizer_state", "predicted_optimizer_state", "after_step_allocated", "before_step_peak"),
    ),
)
