"""``benchmark_fsdp``: the implementations in one table, with earlier rows of the file; pictures of recordings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cs336_systems.experiments.fully_sharded.breakdown import breakdown_figure, breakdown_table, recorded_lines
from cs336_systems.experiments.fully_sharded.cells import FullyShardedCell, make_cells
from cs336_systems.experiments.fully_sharded.measure import measure_fully_sharded
from cs336_systems.experiments.fully_sharded.table import FULLY_SHARDED
from cs336_systems.experiments.ranked import traced_experiment
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show

_TRACED = traced_experiment(
    "benchmark_fsdp",
    FullyShardedCell,
    make_cells,
    measure_fully_sharded,
    FULLY_SHARDED.of,
    (
        *("step", "tokens_per_s", "parameters", "gradients", "optimizer_state", "state_error", "peak_memory"),
        *("sent_per_rank", "gathers", "late_gathers", "gather_wait", "hidden_share"),
    ),
)


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
    """The table; of recorded steps also where their time goes, and a picture of that beside the recordings."""
    _TRACED.present(outcomes, options, csv)
    if options.trace is not None:
        rows = outcome_rows(outcomes)
        for line in recorded_lines(rows):
            show(breakdown_table(line), options.format)
        save(breakdown_figure(rows), options.trace / "breakdown.png")


EXPERIMENT = replace(_TRACED, present=present)
