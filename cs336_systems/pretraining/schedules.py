"""The learning rate of each step of a run.

    rate = LearningRate(peak=3e-4, n_steps=10_000, kind="wsd", warmup_steps=200)
    rate(0)  # 1.5e-6, of the first step

It depends on the step alone.
"""

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]
_COOLDOWN_SHARE = 0.2
"""The least share of steps in the decay of wsd with which it is as good as a cosine (Hägele et al. 2024)."""


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the step alone, so that a resumed run has no schedule state to restore.

    With W steps of warm-up, N in total and f the final fraction, step s has

        s < W     peak (s + 1) / W
        constant  peak
        linear    peak (f + (1 - f) (1 - t))                     t = (s - W) / (N - W)
        cosine    peak (f + (1 - f) (1 + cos(pi t)) / 2)         Loshchilov and Hutter 2017
        wsd       peak until the last C steps, then
                  peak (f + (1 - f) (1 - sqrt(t)))               t = (s - (N - C)) / C; Hägele et al. 2024

    so t is 0 at the first step after the warm-up, and 1 at step N, which a run of N steps does not make. Beyond N the
    rate is constant.

    Attributes:
        peak: the highest rate.
        n_steps: steps of the whole run, warm-up included.
        kind: the shape after the warm-up.
        final_fraction: the rate at the end, as a fraction of the peak.
        cooldown_steps: steps of the decay of wsd; by default the last fifth.

    Raises:
        ValueError: a number is out of range, or warm-up and cool-down are longer than the run.
    """

    peak: float
    n_steps: int
    kind: ScheduleKind = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.0
    cooldown_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"the final fraction of the learning rate must lie in 0..1, got {self.final_fraction}")
        if not 0 <= self.warmup_steps <= self.n_steps:
            raise ValueError(f"warm-up must take 0 to {self.n_steps:,} steps, all there are; got {self.warmup_steps:,}")
        if self.cooldown_steps is not None and self.kind != "wsd":
            raise ValueError(f"only the schedule wsd has cool-down steps, got {self.cooldown_steps:,} with {self.kind}")
        left = self.n_steps - self.warmup_steps
        if not 0 <= (self.cooldown_steps or 0) <= left:
            taken = f"cool-down must take 0 to {left:,} steps, behind the warm-up"
            raise ValueError(f"{taken}; got {self.cooldown_steps:,}")

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        assert step >= 0, step
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / self.warmup_steps)
        length = self.n_steps - self.warmup_steps
        if self.kind == "wsd":
            default = min(length, round(_COOLDOWN_SHARE * self.n_steps))
            length = default if self.cooldown_steps is None else self.cooldown_steps
        elapsed = min(step, self.n_steps) - (self.n_steps - length)
        height = 1.0
        if elapsed > 0 and self.kind != "constant":
            t = elapsed / length
            height = {"linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2, "wsd": 1 - math.sqrt(t)}[self.kind]
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * height)
