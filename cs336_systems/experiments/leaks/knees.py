"""Where a curve turns: the knee between a flat part and a rising one, and where two curves cross.

A resource that binds hides all others: time stays flat while it does, and rises when the next one takes over. The knee
is where the two lines meet, found from measured points without being told the hardware's rates, so that it can stand
beside a knee that was computed from them. Pure arithmetic on (x, y) pairs; units are the caller's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LEAST_RISE = 1.2
"""The rising line must end this many times above the flat one; noise on a shared machine reaches 10 to 20 %."""


@dataclass(frozen=True)
class Knee:
    """``y = max(flat, intercept + slope * x)``, and where its two parts meet."""

    flat: float
    slope: float
    intercept: float

    @property
    def position(self) -> float:
        """The x of the knee."""
        return (self.flat - self.intercept) / self.slope

    def at(self, x: float) -> float:
        """The fitted y at ``x``."""
        return max(self.flat, self.intercept + self.slope * x)


def fit_knee(x: Sequence[float], y: Sequence[float]) -> Knee:
    """The flat and the rising line with the least sum of squared relative errors, over every way to part the points.

    Relative, because times span decades and a long one's noise would outweigh the flat part whole. The flat part gets
    at least one point, the rising part two.

    Raises:
        ValueError: fewer than four points, a y that is not positive, an x that repeats, or y that does not rise.
    """
    points = sorted(zip(x, y, strict=True))
    if len(points) < 4:
        raise ValueError(f"a knee needs at least four points, got {len(points)}")
    xs, ys = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if not (np.isfinite(ys).all() and (ys > 0).all()):
        raise ValueError(f"a knee needs positive times, got {ys.min():g}")
    if (np.diff(xs) == 0).any():
        raise ValueError("a knee needs one time for each position, a position repeats")
    best: tuple[float, Knee] | None = None
    for split in range(1, len(points) - 1):
        flat = (1 / ys[:split]).sum() / (1 / ys[:split] ** 2).sum()
        right_x, right_y = xs[split:], ys[split:]
        columns = np.stack([right_x / right_y, 1 / right_y], axis=1)
        (slope, intercept), *_ = np.linalg.lstsq(columns, np.ones(len(right_x)))
        if slope <= 0 or intercept + slope * xs[-1] < _LEAST_RISE * flat:
            continue
        knee = Knee(float(flat), float(slope), float(intercept))
        error = float(((np.array([knee.at(value) for value in xs]) / ys - 1) ** 2).sum())
        if best is None or error < best[0]:
            best = (error, knee)
    if best is None:
        raise ValueError(f"no knee up to x = {xs[-1]:g}: the points do not rise, go further")
    return best[1]


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
