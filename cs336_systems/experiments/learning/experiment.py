"""``benchmark_learning``: runs of one seed that differ in how products multiply."""

from collections.abc import Sequence
from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.learning.cells import LearningCell, Options, make_cells
from cs336_systems.experiments.learning.measure import measure
from cs336_systems.experiments.learning.table import LEARNING_TABLE
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.pretraining.preparation import default_data
from cs336_systems.pretraining.token_stream import Dataset
from cs336_systems.report.show import show


def stages(options: Options, cells: Sequence[LearningCell], outcomes: list[Outcome]) -> list[Stage]:
    """All runs, once there are data: the default ones are made if nobody has.

    Raises:
        ValueError: there are no such data, or nothing of them is held out.
    """
    dataset = Dataset.open(default_data() if options.data == Options.data else options.data)
    if dataset.evaluation is None:
        raise ValueError(f"{dataset.folder} holds out nothing to evaluate on")
    return [Stage(cells, measure, share=lambda cell: cell.size)]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(LEARNING_TABLE.of(outcome_rows(outcomes)), options.format)


EXPERIMENT = Experiment(
    "benchmark_learning",
    LearningCell,
    make_cells,
    stages,
    present,
    ("evaluation_loss", "least_cosine", "mean_cosine", "tokens_per_s"),
)
