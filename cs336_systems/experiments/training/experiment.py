"""``benchmark_training``: tokens per second of runs, and its table."""

from pathlib import Path

from cs336_systems.experiments.driver import Experiment, one_stage
from cs336_systems.experiments.training.cells import Options, TrainingRunCell, make_cells
from cs336_systems.experiments.training.measure import measure
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.results import MAIN, Column, ResultTable
from cs336_systems.report.show import show

TRAINING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "total_batch_tokens", "dtype", "how"),
        *("world_size", "zero"),
        *("kernels", "keep", "attention", "cuda_graph", "lmhead_chunks", "data", "warmup", "seconds"),
    ),
    always=("size", "how"),
    columns=(
        Column("step ms", "step", ",.1f"),
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN, note="median of the steps after the first few"),
        Column("speed of light %", "speed_of_light", ".1f", optional=True),
        Column("peak GiB", "peak_memory", ".1f", optional=True),
        Column("predicted GiB", "predicted_peak_memory", ".1f", optional=True),
    ),
)


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(TRAINING_TABLE.of(outcome_rows(outcomes)), options.format)


EXPERIMENT = Experiment(
    "benchmark_training",
    TrainingRunCell,
    make_cells,
    one_stage(measure, lambda cell: cell.seconds + 30.0),
    present,
    ("tokens_per_s", "step", "speed_of_light", "peak_memory"),
    default_worlds=lambda device: (1,),
)
