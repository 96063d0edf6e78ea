"""An experiment from cells to exit code: rows, a Markdown table, a figure, one last line of JSON.

What the scripts under ``scripts/abstraction_leaks`` share. A script supplies its cells, the function that measures one,
and ``analyse``, which reads nothing but rows: what a rerun and a committed CSV would show are the same.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.harness.process import Cell, Measure
from cs336_systems.harness.record import RowFile
from cs336_systems.harness.sweep import Outcome, cell_columns, outcome_rows, run_sweep
from cs336_systems.report.console import INTERRUPTED, complain
from cs336_systems.report.show import Format, show
from cs336_systems.report.tables import Table


@dataclass(frozen=True)
class Findings:
    """What the rows of an experiment show."""

    tables: list[Table]
    figures: dict[str, Any]
    """Main figures of the JSON line; None for what the rows do not hold."""
    draw: Callable[[Axes], None] | None = None
    """Draws the one figure on prepared axes; None if there is nothing to draw."""
    title: str = ""
    """Of the figure: what all its points share."""
    size: tuple[float, float] = (7.5, 4.5)
    """Of the figure, in inches."""


def run_experiment(
    name: str,
    cells: Sequence[Cell],
    measure: Measure,
    analyse: Callable[[pd.DataFrame], Findings],
    *,
    describe: Callable[[Any], str],
    expected_s: Callable[[Any], float],
    out: Path | None,
    form: Format,
    timeout_s: float,
) -> int:
    """Measure the cells in one shared process, show what their rows hold, and return the exit code.

    The cells are cheap and compared with each other, so they share a process (its CUDA context, its compiled code) as
    long as none of them fails. With ``out``, rows are appended to ``<name>.csv`` there, and ``<name>.png`` is drawn.

    Returns:
        2 for an unusable ``out``, 130 after Ctrl-C, 1 if a cell ended in an error or timeout, 0 otherwise.
    """
    csv = out / f"{name}.csv" if out else None
    outcomes: list[Outcome] = []
    try:
        row_file = RowFile(csv, cell_columns(type(cells[0]))) if csv else None
    except ValueError as error:
        return complain(name, str(error))
    except OSError as error:
        return complain(name, f"{error.filename}: {error.strerror}")
    try:
        outcomes.extend(
            run_sweep(
                name,
                cells,
                measure,
                row_file=row_file,
                timeout_s=timeout_s,
                describe=describe,
                expected_s=expected_s,
                share=lambda cell: True,
            )
        )
    except OSError as error:
        return complain(name, f"rows could not be written to {csv}: {error.strerror}; every earlier row is there")
    rows = outcome_rows(outcomes)
    findings = analyse(rows[rows["status"] == "ok"])
    for table in findings.tables:
        show(table, form)
    figure = None
    if out and findings.draw is not None:
        figure = out / f"{name}.png"
        try:
            draw_figure(findings, figure)
        except OSError as error:
            return complain(name, f"{figure}: {error.strerror}; the rows are in {csv}")
    statuses = [outcome.status for outcome in outcomes]
    last_line = {"script": name, "ok": statuses.count("ok"), "cells": len(cells), **findings.figures}
    print(json.dumps(last_line | {"csv": str(csv) if csv else None, "figure": str(figure) if figure else None}))
    if statuses[-1] == "interrupted":
        return INTERRUPTED
    return int(any(status in ("error", "timeout") for status in statuses))


def draw_figure(findings: Findings, path: Path) -> None:
    """Draw the findings' figure as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    assert findings.draw is not None
    figure = Figure(figsize=findings.size, layout="constrained")
    axes = figure.subplots()
    findings.draw(axes)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(findings.title, fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def where(rows: pd.DataFrame) -> str:
    """The device that the rows were measured on, for captions and titles."""
    return "" if rows.empty else str(rows["gpu"].iloc[0] or rows["host"].iloc[0])
