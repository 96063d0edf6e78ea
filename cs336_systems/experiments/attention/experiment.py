"""``benchmark_attention``: every cell, then a table for each grid, and the tiles that were searched."""

from collections.abc import Sequence
from pathlib import Path

from cs336_systems.experiments.attention.cells import AttentionCell, Options, make_cells
from cs336_systems.experiments.attention.measure import measure
from cs336_systems.experiments.attention.table import ATTENTION, tile_table
from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.show import show


def stages(options: Options, cells: Sequence[AttentionCell], outcomes: list[Outcome]) -> list[Stage]:
    """Cells of a grid and dtype share a process; with ``--repeat`` all do. Compiling anew for each shape is what they
    would pay for more; what an earlier cell still holds is not counted in a later one's peak."""
    return [
        Stage(
            cells,
            measure,
            expected_s=lambda cell: cell.work.forward_flops + 1e11,  # no seconds, but in proportion to them
            share=lambda cell: options.repeat > 1 or (cell.grid, cell.dtype),
        )
    ]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    rows = outcome_rows(outcomes)
    for grid in dict.fromkeys(rows["grid"]):
        show(ATTENTION.of(rows[rows["grid"] == grid]), options.format)
    if options.autotune:
        show(tile_table(rows), options.format)


EXPERIMENT = Experiment(
    "benchmark_attention",
    AttentionCell,
    make_cells,
    stages,
    present,
    ("forward", "backward", "both", "both_tflops", "peak_memory"),
)
