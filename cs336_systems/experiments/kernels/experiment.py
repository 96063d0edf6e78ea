"""``benchmark_kernels``: time, bandwidth and error of each fused kernel, against its formula and others' kernels."""

from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.kernels.cells import KernelCell, Options, make_cells
from cs336_systems.experiments.kernels.figure import shares_figure
from cs336_systems.experiments.kernels.measure import measure
from cs336_systems.experiments.kernels.table import KERNEL_TABLE
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    show(KERNEL_TABLE.of(outcome_rows(outcomes)), options.format)
    if csv:
        save(shares_figure(read_rows(csv)), csv.with_suffix(".png"))


EXPERIMENT = Experiment(
    "benchmark_kernels",
    KernelCell,
    make_cells,
    lambda options, cells, outcomes: [Stage(cells, measure, share=lambda cell: cell.device)],
    present,
    ("forward", "forward_copy_share", "forward_extra", "backward", "backward_copy_share"),
)
