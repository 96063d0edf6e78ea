"""Is it faster? Ratios of new medians to old ones, with a verdict that respects the noise.

For each cell that both runs hold, the ratio of medians gets a 95 % interval from the bootstrap (Efron 1979: resample
both sides, take the ratio, repeat). The verdict asks that interval against a margin of two percent:

    same     the interval lies inside the margin: no difference worth the name, and enough samples to say so
    faster   the interval lies wholly below 1 - margin
    slower   the interval lies wholly above 1 + margin
    unclear  anything else: take more samples

What the samples cannot show, such as another machine, driver or commit, is listed beside the table.
"""

import numpy as np
import pandas as pd

from cs336_systems.report.tables import CEILING, SETTINGS, Table, settings_split

MARGIN = 0.02
"""Repeated runs of one binary on one GPU differ by about one percent; half of the margin."""

_RESAMPLES = 2000
_IDENTITY = ("gpu", "host", "driver", "cuda", "torch", "triton")


def ratio_interval(new: list[float], old: list[float], seed: int = 0) -> tuple[float, float, float]:
    """(ratio, low, high): median(new) / median(old) with its 95 % bootstrap interval.

    Raises:
        ValueError: either side has no samples.
    """
    if not new or not old:
        raise ValueError(f"a ratio needs samples on both sides, got {len(new)} new and {len(old)} old")
    generator = np.random.default_rng(seed)

    def medians(samples: list[float]) -> np.ndarray:
        values = np.asarray(samples)
        return np.median(values[generator.integers(0, values.size, (_RESAMPLES, values.size))], axis=1)

    low, high = np.percentile(medians(new) / medians(old), (2.5, 97.5))
    return float(np.median(new) / np.median(old)), float(low), float(high)


def verdict(low: float, high: float, margin: float = MARGIN) -> str:
    """The word for an interval of time ratios (new / old): see the module's docstring."""
    if 1 - margin <= low and high <= 1 + margin:
        return "same"
    if high < 1 - margin:
        return "faster"
    if low > 1 + margin:
        return "slower"
    return "unclear"


def compare(new: pd.DataFrame, old: pd.DataFrame) -> Table:
    """One line per phase of every cell that both hold: old ms, new ms, ratio, interval, verdict.

    The newest row wins where a file holds a cell several times. Cells that only one side measured are counted in the
    caption, as are differences of machine and versions.
    """
    keys = [*(column for column in SETTINGS if column not in ("warmup", "steps")), "metric"]
    sides = [_timings(frame, keys) for frame in (new, old)]
    shared = [key for key in sides[0] if key in sides[1]]
    lines = []
    for key in shared:
        now, before = (side[key] for side in sides)
        ratio, low, high = ratio_interval(now["samples"], before["samples"])
        lines.append(
            dict(zip(keys, key, strict=True))
            | {
                "old ms": f"{before['median']:.3f}",
                "new ms": f"{now['median']:.3f}",
                "new / old": f"{ratio:.3f}",
                "95 % interval": f"{low:.3f}–{high:.3f}",
                "verdict": verdict(low, high),
            }
        )
    notes = [
        f"timings in the {name} rows only: {len(side.keys() - set(shared))}"
        for side, name in zip(sides, ("new", "old"), strict=True)
    ]
    notes += [
        f"{column}: {', '.join(map(str, olds))} -> {', '.join(map(str, news))}"
        for column in _IDENTITY
        if (olds := sorted(set(old[column]))) != (news := sorted(set(new[column])))
    ]
    figures = ["old ms", "new ms", "new / old", "95 % interval", "verdict"]
    frame = pd.DataFrame(lines, columns=[*keys, *figures])
    caption, varying = settings_split(frame, keys[:-1])
    return Table("; ".join([caption, *notes] if caption else notes), frame[[*varying, "metric", *figures]])


def _timings(frame: pd.DataFrame, keys: list[str]) -> dict[tuple, pd.Series]:
    """Rows that hold time samples, by cell and metric."""
    frame = frame[(frame["unit"] == "ms") & (frame["variant"] != CEILING) & (frame["metric"] != "warmup_step")]
    return {tuple(str(row[key]) for key in keys): row for _, row in frame.iterrows() if row["samples"]}
