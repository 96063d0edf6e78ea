"""What the lecture's experiments share: how their rows are shown, and where a measured curve turns.

``analyse`` reads nothing but rows: what a rerun and a committed CSV show are the same.

**Knees.** A resource that binds hides all others: time stays flat while it does, and rises when the next takes over.
Each part is measured where the other is far away, so the two rates are what the resources give by themselves, and the
knee is where they meet. Around it a real curve lies above both lines, as the resources are never shared perfectly; a
line fitted to the points there would have that in its slope and intercept, and promise rates that no hardware has.
"""

from __future__ import annotations

import math
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

FAR = 3.0
"""Points up to the knee over this are flat, those from the knee times this on rise; the others lie at the corner."""


@dataclass(frozen=True)
class Findings:
    """What the rows of an experiment show.

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
    """What ``draw`` draws, under its title."""
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
    from cs336_systems.report.figures import PLAIN

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN)


def where(rows: pd.DataFrame) -> str:
    """The device that the rows were measured on, for captions and titles."""
    return "" if rows.empty else str(rows["gpu"].iloc[0] or rows["host"].iloc[0])


@dataclass(frozen=True)
class Knee:
    """``y = fixed + max(flat, slope * x)``, and where its two parts meet."""

    flat: float
    slope: float
    fixed: float = 0.0

    @property
    def position(self) -> float:
        """The x of the knee."""
        return self.flat / self.slope

    def at(self, x: float) -> float:
        """The y of the two lines at ``x``."""
        return self.fixed + max(self.flat, self.slope * x)


def fit_knee(x: Sequence[float], y: Sequence[float], fixed: float = 0.0) -> Knee:
    """The level of the points far below the knee and the proportionality of those far above it, both above ``fixed``.

    The knee of the first and the last point alone decides which points are far. Errors count relatively, as times span
    decades.

    Args:
        fixed: the part of every y that is measured by itself, such as a launch.

    Raises:
        ValueError: fewer than four points, an x that is not positive or repeats, a y that is not above ``fixed``, or a
            last y that is not far above the first.
    """
    import numpy as np

    points = sorted(zip(x, y, strict=True))
    if len(points) < 4:
        raise ValueError(f"a knee needs at least four points, got {len(points)}")
    xs, ys = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if not (np.isfinite(ys).all() and (ys > fixed).all()):
        raise ValueError(f"a knee needs times above the fixed {fixed:g}, got {ys.min():g}")
    if xs[0] <= 0 or (np.diff(xs) == 0).any():
        raise ValueError("a knee needs one time for each positive position, one repeats or is not positive")
    own = ys - fixed
    if own[-1] < FAR * own[0]:
        raise ValueError(f"no knee up to x = {xs[-1]:g}: the points do not rise to {FAR:g} times the first, go further")
    estimate = xs[-1] * own[0] / own[-1]
    below, above = xs <= max(estimate / FAR, xs[0]), xs >= min(FAR * estimate, xs[-1])
    flat = (1 / own[below]).sum() / (1 / own[below] ** 2).sum()
    per_x = xs[above] / own[above]
    return Knee(float(flat), float(per_x.sum() / (per_x**2).sum()), fixed)


def crossing(x: Sequence[float], y: Sequence[float], level: Sequence[float] | float) -> float | None:
    """The x from which ``y`` stays at or above ``level`` (a number, or another curve at the same x), or None if never.

    Read from the right, so that noise among the small x does not count; between two points both curves are straight on
    logarithmic axes. A y above the level everywhere crosses at the first x.

    Raises:
        ValueError: no points, or a value that is not positive.
    """
    levels = [level] * len(x) if isinstance(level, (int, float)) else list(level)
    points = sorted(zip(x, y, levels, strict=True))
    if not points or min(value for point in points for value in point) <= 0:
        raise ValueError("a crossing needs points with positive values only")
    above = [math.log(own / other) for _, own, other in points]
    if above[-1] < 0:
        return None
    last_below = max((i for i, value in enumerate(above) if value < 0), default=None)
    if last_below is None:
        return float(points[0][0])
    left, right = math.log(points[last_below][0]), math.log(points[last_below + 1][0])
    share = -above[last_below] / (above[last_below + 1] - above[last_below])
    return math.exp(left + share * (right - left))
