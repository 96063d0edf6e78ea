"""Parts that the lecture's experiments share: rows told and drawn, and where a measured curve crosses a level.

``analyse`` reads nothing but rows: a rerun and a committed CSV are told in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.experiments.driver import Experiment, one_stage

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cs336_systems.harness.sweep import Outcome
    from cs336_systems.report.tables import Table


@dataclass(frozen=True)
class Findings:
    """The findings in the rows of an experiment.

    Attributes:
        figures: main figures of the JSON line; None for what the rows do not hold.
        draw: draws the one figure on prepared axes; None if there is nothing to draw.
        title: what all points of the figure share.
        size: width and height of the figure, in inches.
    """

    tables: list[Table]
    figures: dict[str, Any]
    draw: Callable[[Axes], None] | None = None
    title: str = ""
    size: tuple[float, float] = (7.5, 4.5)


def leak_experiment(
    name: str,
    cell: type,
    options: Any,
    make_cells: Callable[[Any], Sequence[Any]],
    measure: Callable[[Any], Any],
    analyse: Callable[[pd.DataFrame], Findings],
    expected_s: Callable[[Any], float],
) -> Experiment:
    """An experiment that shows what ``analyse`` finds, and draws it as ``<name>.png`` beside the rows.

    The cells are cheap and compared with each other, so they share a process (its CUDA context, its compiled code) as
    long as none of them fails.
    """

    def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> dict[str, Any]:
        from cs336_systems.harness.sweep import outcome_rows
        from cs336_systems.report.figures import save
        from cs336_systems.report.show import show

        rows = outcome_rows(outcomes)
        findings = analyse(rows[rows["status"] == "ok"])
        for table in findings.tables:
            show(table, options.format)
        figure = csv.with_suffix(".png") if csv and findings.draw else None
        if figure:
            save(findings_figure(findings), figure)
        return findings.figures | {"figure": str(figure) if figure else None}

    stages = one_stage(measure, expected_s, share=lambda cell: True)
    return Experiment(name, cell, make_cells, stages, present, headlines=(), options=options)


def findings_figure(findings: Findings) -> Figure:
    """The figure that ``draw`` draws, under its title."""
    from matplotlib.figure import Figure

    from cs336_systems.report.figures import dress

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
    from matplotlib.ticker import NullFormatter

    from cs336_systems.report.figures import PLAIN

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN)


def where(rows: pd.DataFrame) -> str:
    """The device that the rows were measured on, for captions and titles."""
    return "" if rows.empty else str(rows["gpu"].iloc[0] or rows["host"].iloc[0])


def medians(rows: pd.DataFrame, index: str, columns: str = "metric") -> pd.DataFrame:
    """The median over all rows for each value of the column ``index`` (lines, sorted) and of ``columns``."""
    return rows.pivot_table(index=index, columns=columns, values="median", aggfunc="median").sort_index()


def crossing(curve: pd.Series, level: pd.Series | float) -> float | None:
    """The x from which a curve over x stays at or above ``level``, a number or another curve, or None if never.

    It is searched from the right, so that noise among the small x does not count; between two points both curves are
    straight on logarithmic axes. A curve above the level everywhere crosses it at its first x.
    """
    import numpy as np

    above, x = np.log((curve / level).to_numpy(float)), np.log(curve.index.to_numpy(float))
    below = np.flatnonzero(above < 0)
    if not below.size:
        return float(np.exp(x[0]))
    last = int(below[-1])
    if last == len(x) - 1:
        return None
    return float(np.exp(x[last] - above[last] * (x[last + 1] - x[last]) / (above[last + 1] - above[last])))
