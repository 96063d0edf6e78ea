"""Is it faster? Ratios of new medians to old ones, with a verdict that respects the noise.

For each cell that both runs hold, the ratio of medians gets a 95 % interval from the bootstrap (Efron 1979: resample
both sides, take the ratio, repeat). Samples of one process do not show how much processes differ from each other, so
whole processes are resampled, too; with fewer than three a side (``--repeat 3``) that says little, and the interval is
widened by ``PROCESS_NOISE``. The verdict asks the interval against a margin of two percent:

    same     the interval lies inside the margin: no difference worth the name, and enough processes to say so
    faster   the interval lies wholly below 1 - margin
    slower   the interval lies wholly above 1 + margin
    unclear  anything else: measure more processes

What the samples cannot show, such as another machine, driver or commit, is listed beside the table.
"""

import numpy as np
import pandas as pd

from cs336_systems.report.tables import CEILING, SETTINGS, Table, settings_split

MARGIN = 0.02
"""Differences below this are called none."""

PROCESS_NOISE = 0.2
"""How far apart the medians of processes that measure one cell may lie. Of 60 timings that the committed H200 rows
hold several times, half agree within 0.016 (cells that keep the GPU busy) and 57 within 0.2; the other three, up to
0.61, are compiled cells that wait for launches."""

_ENOUGH_PROCESSES = 3
_RESAMPLES = 2000
_IDENTITY = ("gpu", "host", "driver", "cuda", "torch", "triton", "commit", "dirty")

Processes = list[list[float]]
"""Samples of one cell, by the process that took them."""


def ratio_interval(new: Processes, old: Processes, seed: int = 0) -> tuple[float, float, float]:
    """(ratio, low, high): median(new) / median(old) of the processes' medians, with its 95 % interval.

    Raises:
        ValueError: either side has no samples.
    """
    if not (new and old and all(new) and all(old)):
        raise ValueError(f"a ratio needs samples on both sides, got {new} and {old}")
    generator = np.random.default_rng(seed)

    def resampled(processes: Processes) -> np.ndarray:
        medians = np.stack([_resampled_medians(samples, generator) for samples in processes])
        chosen = generator.integers(0, len(processes), (len(processes), _RESAMPLES))
        return np.median(medians[chosen, np.arange(_RESAMPLES)], axis=0)

    low, high = np.percentile(resampled(new) / resampled(old), (2.5, 97.5))
    if min(len(new), len(old)) < _ENOUGH_PROCESSES:
        low, high = low / (1 + PROCESS_NOISE), high * (1 + PROCESS_NOISE)
    new_median, old_median = (np.median([np.median(samples) for samples in side]) for side in (new, old))
    return float(new_median / old_median), float(low), float(high)


def _resampled_medians(samples: list[float], generator: np.random.Generator) -> np.ndarray:
    values = np.asarray(samples)
    return np.median(values[generator.integers(0, values.size, (_RESAMPLES, values.size))], axis=1)


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

    All rows of a cell count, as processes of their own. Cells that only one side measured are counted in the caption,
    and differences of machine and versions are listed there.
    """
    keys = [*(column for column in SETTINGS if column != "steps"), "metric"]
    sides = [_timings(frame, keys) for frame in (new, old)]
    shared = [key for key in sides[0] if key in sides[1]]
    lines = []
    for key in shared:
        now, before = (side[key] for side in sides)
        ratio, low, high = ratio_interval(now, before)
        lines.append(
            dict(zip(keys, key, strict=True))
            | {
                "old ms": f"{np.median([np.median(samples) for samples in before]):.3f}",
                "new ms": f"{np.median([np.median(samples) for samples in now]):.3f}",
                "processes": f"{len(before)}, {len(now)}",
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
    figures = ["old ms", "new ms", "processes", "new / old", "95 % interval", "verdict"]
    frame = pd.DataFrame(lines, columns=[*keys, *figures])
    caption, varying = settings_split(frame, keys[:-1])
    return Table("; ".join([caption, *notes] if caption else notes), frame[[*varying, "metric", *figures]])


def _timings(frame: pd.DataFrame, keys: list[str]) -> dict[tuple, Processes]:
    """Time samples by cell and metric, a list for each process."""
    frame = frame[(frame["unit"] == "ms") & (frame["variant"] != CEILING) & (frame["metric"] != "warmup_step")]
    timings: dict[tuple, Processes] = {}
    for _, row in frame.iterrows():
        if row["samples"]:
            timings.setdefault(tuple(str(row[key]) for key in keys), []).append(row["samples"])
    return timings
