"""``benchmark_fp8``: products and blocks, quantized and not, against torchao's."""

from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.fp8.cells import Fp8Cell, Options, make_cells
from cs336_systems.experiments.fp8.measure import measure
from cs336_systems.experiments.fp8.table import BLOCK_TABLE, PRODUCT_TABLE
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.show import show


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    rows = outcome_rows(outcomes)
    for part, table in (("product", PRODUCT_TABLE), ("block", BLOCK_TABLE)):
        if (rows["part"] == part).any():
            show(table.of(rows[rows["part"] == part]), options.format)


EXPERIMENT = Experiment(
    "benchmark_fp8",
    Fp8Cell,
    make_cells,
    lambda options, cells, outcomes: [Stage(cells, measure, share=lambda cell: cell.shape)],
    present,
    ("forward", "backward", "step", "tflops", "least_cosine", "mean_cosine"),
)
