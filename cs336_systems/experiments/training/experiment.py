"""``benchmark_training``: tokens per second of runs, their table and picture."""

from pathlib import Path

from cs336_systems.experiments.driver import Experiment, one_stage
from cs336_systems.experiments.training.cells import Options, TrainingRunCell, make_cells
from cs336_systems.experiments.training.figure import rates_figure
from cs336_systems.experiments.training.measure import measure
from cs336_systems.experiments.training.table import TRAINING_TABLE
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(TRAINING_TABLE.of(outcome_rows(outcomes)), options.format)
    if csv is not None:
        save(rates_figure(read_rows(csv), {}), csv.with_suffix(".png"))


EXPERIMENT = Experiment(
    "benchmark_training",
    TrainingRunCell,
    make_cells,
    one_stage(measure, lambda cell: cell.seconds + 30.0),
    present,
    ("tokens_per_s", "step", "speed_of_light", "peak_memory"),
    default_worlds=lambda device: (1,),
)
