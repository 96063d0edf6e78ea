"""``benchmark_model``: ceilings first, then every cell; a table, a comparison if asked for, figures."""

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.model import cells as grid
from cs336_systems.experiments.model import measure
from cs336_systems.experiments.model.cells import CEILING, CeilingCell, ModelCell, Options
from cs336_systems.experiments.model.figure import step_figure
from cs336_systems.experiments.model.frontier import frontier_figure
from cs336_systems.experiments.model.table import step_table
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.sweep import Outcome, cell_columns, outcome_rows
from cs336_systems.report.compare import compare
from cs336_systems.report.figures import save
from cs336_systems.report.show import show


def make_cells(options: Options) -> list[ModelCell]:
    """The grid, under a memory budget with the policies that fit it, which are told on stderr.

    Raises:
        ValueError: a value that no cell can have, a budget that no policy fits, or rows that are none to compare with.
        OSError: those rows cannot be read.
    """
    cells = grid.make_cells(options)
    if options.compare is not None:
        read_rows(options.compare, cell_columns(ModelCell))
    if options.memory_budget_gib is not None:
        cells, notes = measure.fit_to_budget(cells, options.memory_budget_gib)
        print(*notes, sep="\n", file=sys.stderr)
    return cells


def stages(options: Options, cells: Sequence[ModelCell], outcomes: list[Outcome]) -> Iterator[Stage]:
    """The ceilings of every dtype; then the cells, which stand beside them."""
    ceilings: measure.Ceilings = {}
    expected_s = functools.partial(measure.expected_seconds, ceilings=ceilings)
    yield Stage(grid.ceiling_cells(options), measure.measure_ceiling, expected_s)
    for outcome in outcomes:
        medians = {metric: outcome.median(metric) for metric in ("matmul_ceiling", "copy_ceiling", "free_memory")}
        ceilings[outcome.cell.dtype] = {name: value for name, value in medians.items() if value is not None}
    yield Stage(cells, functools.partial(measure.measure_model, ceilings=ceilings, force=options.force), expected_s)


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> None:
    """The table, the comparison, and the figures of all rows of the file."""
    rows = outcome_rows(outcomes)
    if (rows["variant"] != CEILING).any():
        show(step_table(rows), options.format)
        if options.compare is not None:
            before = read_rows(options.compare)
            appended = len(rows) if csv and csv.samefile(options.compare) else 0
            show(compare(rows, before.head(len(before) - appended)), options.format)
    if csv:
        save(step_figure(read_rows(csv)), csv.with_suffix(".png"))
        save(frontier_figure(read_rows(csv)), csv.with_name(f"{csv.stem}_frontier.png"))


EXPERIMENT = Experiment(
    "benchmark_model",
    ModelCell,
    make_cells,
    stages,
    present,
    (
        *("matmul_ceiling", "copy_ceiling", "forward", "backward", "optimizer", "step"),
        *("tokens_per_s", "mfu", "peak_memory"),
    ),
    measured=lambda cell: not isinstance(cell, CeilingCell),
)
