"""Where a curve turns: the knee between a flat part and a rising one, and where two curves cross.

A resource that binds hides all others: time stays flat while it does, and rises when the next one takes over. Each
part is measured where the other is far away, so the two rates are what the resources gave by themselves, and the knee
is where they meet: it follows from the rates and from nothing else. Around it a real curve lies above both lines, as
the resources are never shared perfectly; a line fitted to the points there would have that in its slope and intercept,
and promise rates that no hardware has. Pure arithmetic on (x, y) pairs; units are the caller's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FAR = 3.0
"""Points up to the knee over this are flat, those from the knee times this on rise; the others lie at the corner."""


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

    Which points are far is told by the knee that the first and the last one give. Errors count relatively, as times
    span decades.

    Args:
        fixed: what every y holds besides, such as a launch, measured by itself.

    Raises:
        ValueError: fewer than four points, an x that is not positive or repeats, a y that is not above ``fixed``, or a
            last y that is not far above the first.
    """
    points = sorted(zip(x, y, strict=True))
    if len(points) < 4:
        raise ValueError(f"a knee needs at least four points, got {len(points)}")
    xs, ys = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if not (np.isfinite(ys).all() and (ys > fixed).all()):
        beside = f" above the fixed {fixed:g}" if fixed else ""
        raise ValueError(f"a knee needs positive times{beside}, got {ys.min():g}")
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
