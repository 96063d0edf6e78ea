"""What the four leak experiments share: their cells, and what their rows show.

``analyse`` reads nothing but rows: what a rerun and a committed CSV would show are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.options import RunOptions
from cs336_systems.harness.isolation import Cell, Measure
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import PLAIN, dress, save
from cs336_systems.report.show import show
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


def leak_experiment(
    name: str,
    cell: type,
    make_cells: Callable[[Any], Sequence[Cell]],
    measure: Measure,
    analyse: Callable[[pd.DataFrame], Findings],
    expected_s: Callable[[Any], float],
) -> Experiment:
    """An experiment that shows what ``analyse`` finds, and draws it as ``<name>.png`` beside the rows.

    The cells are cheap and compared with each other, so they share a process (its CUDA context, its compiled code) as
    long as none of them fails.
    """

    def stages(options: RunOptions, cells: Sequence[Cell], outcomes: list[Outcome]) -> list[Stage]:
        return [Stage(cells, measure, expected_s, share=lambda cell: True)]

    def present(outcomes: list[Outcome], options: RunOptions, csv: Path | None) -> dict[str, Any]:
        rows = outcome_rows(outcomes)
        findings = analyse(rows[rows["status"] == "ok"])
        for table in findings.tables:
            show(table, options.format)
        figure = csv.with_suffix(".png") if csv and findings.draw else None
        if figure:
            save(findings_figure(findings), figure)
        return findings.figures | {"figure": str(figure) if figure else None}

    return Experiment(name, cell, make_cells, stages, present, headlines=())


def findings_figure(findings: Findings) -> Figure:
    """What ``draw`` draws, under its title."""
    assert findings.draw is not None
    figure = Figure(figsize=findings.size, layout="constrained")
    axes = figure.subplots()
    findings.draw(axes)
    dress(axes)
    axes.set_axisbelow(True)
    axes.set_title(findings.title, fontsize=10, loc="left")
    return figure


def logarithmic(axes: Axes) -> None:
    """Both axes logarithmic, x in powers of two, with plain numbers at the ticks."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN)


def where(rows: pd.DataFrame) -> str:
    """The device that the rows were measured on, for captions and titles."""
    return "" if rows.empty else str(rows["gpu"].iloc[0] or rows["host"].iloc[0])
