"""Losses and gradient norms that are far from those of the steps before: a bad batch, or a run about to diverge.

A step's z-score is its distance from the mean of the 100 steps before it, in their standard deviations. Nothing is
flagged before there are as many, since the first steps change too fast. A value that is not finite is always flagged,
and is left out of what later ones are compared with.
"""

import math
from collections import deque
from typing import Literal

from cs336_systems.pretraining.run_records import Outlier, Step

WINDOW = 100
"""Steps."""
FLAGGED_Z = 6.0
"""Normal noise, its deviation estimated from 100 steps, gets there once in 2 x 10^7 steps."""

_QUANTITIES: tuple[Literal["loss", "norm"], ...] = ("loss", "norm")


class OutlierWatch:
    """Remembers the last steps, and flags one that differs from them."""

    def __init__(self) -> None:
        self._windows: dict[str, deque[float]] = {quantity: deque(maxlen=WINDOW) for quantity in _QUANTITIES}

    def see(self, step: Step) -> list[Outlier]:
        """What of this step is far from the steps seen before it."""
        outliers = []
        for quantity in _QUANTITIES:
            value = getattr(step, quantity)
            z = self._z(self._windows[quantity], value)
            if not abs(z) < FLAGGED_Z:
                outliers.append(Outlier(step.step, quantity, value, z))
            if math.isfinite(value):
                self._windows[quantity].append(value)
        return outliers

    def _z(self, window: deque[float], value: float) -> float:
        if not math.isfinite(value):
            return value
        if len(window) < WINDOW:
            return 0.0
        mean = sum(window) / WINDOW
        distance = value - mean
        deviation = math.sqrt(sum((one - mean) ** 2 for one in window) / WINDOW)
        if deviation == 0:
            return 0.0 if distance == 0 else math.copysign(math.inf, distance)
        return distance / deviation
