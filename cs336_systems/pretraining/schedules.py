"""The learning rate as a function of the step alone: a run that resumes has nothing to restore.

    schedule = Schedule(peak=3e-4, n_steps=10_000, kind="wsd", warmup_steps=200)
    schedule(0)                       # 1.5e-6, of the first step

With W steps of warm-up, N in all and f the final fraction, step s has

    s < W     peak (s + 1) / W
    constant  peak
    linear    peak (f + (1 - f) (1 - t))                     t = (s - W) / (N - W)
    cosine    peak (f + (1 - f) (1 + cos(pi t)) / 2)         Loshchilov and Hutter 2017
    wsd       peak until the last C steps, then
              peak (f + (1 - f) (1 - sqrt(t)))               t = (s - (N - C)) / C; Hägele et al. 2024

so t is 0 at the first step after the warm-up, and 1 at step N, which a run of N steps does not make: a rate of zero
would be a step for nothing. Beyond N the rate stays.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]
_COOLDOWN_SHARE = 0.2
"""Of all steps: the share from which wsd is as good as a cosine (Hägele et al. 2024)."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step.

    Raises:
        ValueError: a number is out of range, or warm-up and cool-down are longer than the run.
    """

    peak: float
    """The highest rate."""
    n_steps: int
    """Of the whole run, warm-up included."""
    kind: ScheduleKind = "cosine"
    """What comes after the warm-up."""
    warmup_steps: int = 0
    final_fraction: float = 0.0
    """Of the peak, at the end."""
    cooldown_steps: int | None = None
    """Of wsd alone; by default the last fifth of the steps."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"unknown schedule {self.kind!r}: known are {', '.join(get_args(ScheduleKind))}")
        if not (self.peak >= 0 and math.isfinite(self.peak)):
            raise ValueError(f"a learning rate must be finite and not negative, got {self.peak}")
        if self.n_steps < 1:
            raise ValueError(f"a schedule has at least one step, got {self.n_steps}")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"the final fraction of the learning rate must lie in 0..1, got {self.final_fraction}")
        if not 0 <= self.warmup_steps <= self.n_steps:
            raise ValueError(f"warm-up must take 0 to {self.n_steps:,} steps, all there are; got {self.warmup_steps:,}")
        if self.cooldown_steps is None:
            return
        if self.kind != "wsd":
            raise ValueError(f"only the schedule wsd has cool-down steps, got {self.cooldown_steps:,} with {self.kind}")
        if not 0 <= self.cooldown_steps <= self.n_steps - self.warmup_steps:
            raise ValueError(
                f"cool-down must take 0 to {self.n_steps - self.warmup_steps:,} steps, those after the warm-up; "
                f"got {self.cooldown_steps:,}"
            )

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 0.

        Raises:
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"steps are counted from 0, got {step}")
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / self.warmup_steps)
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * self._height(step))

    def _height(self, step: int) -> float:
        """How far the rate is above the final one: from 1 down to 0."""
        if self.kind == "constant":
            return 1.0
        length = self._decaying_steps
        elapsed = min(step, self.n_steps) - (self.n_steps - length)
        if elapsed <= 0:
            return 1.0
        t = elapsed / length
        return {"linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2, "wsd": 1 - math.sqrt(t)}[self.kind]

    @property
    def _decaying_steps(self) -> int:
        after_warmup = self.n_steps - self.warmup_steps
        if self.kind != "wsd":
            return after_warmup
        if self.cooldown_steps is not None:
            return self.cooldown_steps
        return min(after_warmup, round(_COOLDOWN_SHARE * self.n_steps))
