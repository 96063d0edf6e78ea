"""``benchmark_fsdp``: the implementations in one table, with earlier rows of the file; pictures of recordings."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cs336_systems.costs.planner import cheapest_keep
from cs336_systems.experiments.fully_sharded import cells as grid
from cs336_systems.experiments.fully_sharded.breakdown import breakdown_figure, breakdown_table, recorded_lines
from cs336_systems.experiments.fully_sharded.cells import OURS, FullyShardedCell, Options
from cs336_systems.experiments.fully_sharded.measure import measure_fully_sharded
from cs336_systems.experiments.fully_sharded.table import FULLY_SHARDED
from cs336_systems.experiments.ranked import traced_experiment
from cs336_systems.hardware import GIB
from cs336_systems.harness.fit import predicted_peak
from cs336_systems.harness.isolation import reports
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show


def make_cells(options: Options) -> list[FullyShardedCell]:
    """The grid; under a memory budget with what blocks are to keep, which is told on stderr.

    Raises:
        ValueError: a value that no cell can have, or a budget that nothing fits.
    """
    cells = grid.make_cells(options)
    if options.memory_budget_gib is None:
        return cells
    budget, notes = int(options.memory_budget_gib * GIB), list[str]()
    for i, cell in enumerate(cells):
        if cell.fsdp == OURS and cell.written_out:
            predict = partial(predicted_peak, world_size=cell.world_size)
            choice = cheapest_keep(cell, "step", budget, predict, mixed=True)
            cells[i] = replace(cell, keep=choice.keep)
            what = str(cell).replace(f" keep {cell.keep}", "", 1)
            notes.append(f"{what} within {options.memory_budget_gib:g} GiB, least recomputation: {choice}")
    if reports():
        print(*dict.fromkeys(notes), sep="\n", file=sys.stderr)
    return cells


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
