"""``benchmark_learning``: runs of one seed that differ in how products multiply."""

from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.learning.cells import LearningCell, Options, make_cells
from cs336_systems.experiments.learning.measure import measure
from cs336_systems.experiments.learning.table import LEARNING_TABLE
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.show import show


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(LEARNING_TABLE.of(outcome_rows(outcomes)), options.format)


EXPERIMENT = Experiment(
    "benchmark_learning",
    LearningCell,
    make_cells,
    lambda options, cells, outcomes: [Stage(cells, measure, share=lambda cell: cell.size)],
    present,
    ("evaluation_loss", "least_cosine", "mean_cosine", "tokens_per_s"),
)
