"""``benchmark_blocks``: time and memory of blocks, written out and compiled."""

from pathlib import Path

from cs336_systems.experiments.blocks.cells import BlockCell, Options, make_cells
from cs336_systems.experiments.blocks.figure import kept_figure
from cs336_systems.experiments.blocks.measure import measure
from cs336_systems.experiments.blocks.table import BLOCK_TABLE
from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(BLOCK_TABLE.of(outcome_rows(outcomes)), options.format)
    if csv:
        save(kept_figure(read_rows(csv)), csv.with_suffix(".png"))


EXPERIMENT = Experiment(
    "benchmark_blocks",
    BlockCell,
    make_cells,
    lambda options, cells, outcomes: [Stage(cells, measure, share=lambda cell: cell.shape)],
    present,
    ("forward", "backward", "step", "kept", "peak"),
)
