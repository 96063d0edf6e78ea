"""``benchmark_streaming``: training steps under caps on device and host memory."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.streaming.cells import Options, StreamingCell, make_cells
from cs336_systems.experiments.streaming.figure import heatmaps
from cs336_systems.experiments.streaming.measure import measure
from cs336_systems.experiments.streaming.table import STREAMING_TABLE
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show


def stages(options: Options, cells: Sequence[StreamingCell], outcomes: list[Outcome]) -> list[Stage]:
    """All cells, with pictures beside the rows if they are asked for; those that are simulated share a process."""
    pictures = options.out if options.timeline else None
    return [Stage(cells, partial(measure, pictures=pictures), share=lambda cell: cell.simulated_device or cell)]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(STREAMING_TABLE.of(outcome_rows(outcomes)), options.format)
    if csv:
        for name, figure in heatmaps(read_rows(csv)):
            save(figure, csv.with_name(f"{csv.stem}_{name}.png"))


EXPERIMENT = Experiment(
    "benchmark_streaming",
    StreamingCell,
    make_cells,
    stages,
    present,
    ("tokens_per_s", "simulated_tokens_per_s", "mfu", "simulated_mfu", "simulated_over_measured", "device_in_use"),
)
