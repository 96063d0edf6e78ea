"""Is one set of timings faster than another? Ratios of medians with an interval, and a verdict from it.

The ratio of medians gets a 95 % interval from the bootstrap (Efron 1979: resample both sides, take the ratio, repeat).
Samples of one process do not show how much processes differ from each other, so whole processes are resampled, too;
with fewer than three a side (``--repeat 3``) that says little, and the interval is widened by how far apart processes
and samples lie on this machine, at least ``PROCESS_NOISE``. The verdict asks the interval against a margin of two
percent:

    same     the interval lies inside the margin: no difference worth the name, and enough processes to say so
    faster   the interval lies wholly below 1 - margin
    slower   the interval lies wholly above 1 + margin
    unclear  anything else: measure more processes
"""

from collections.abc import Iterable

import numpy as np

MARGIN = 0.02
"""Differences below this are called none."""

PROCESS_NOISE = 0.2
"""How far apart the medians of processes that measure one cell may lie. Of 60 timings that the committed H200 rows
hold several times, half agree within 0.016 (cells that keep the GPU busy) and 57 within 0.2; the other three, up to
0.61, are compiled cells that wait for launches."""

ENOUGH_PROCESSES = 3
_RESAMPLES = 2000

Processes = list[list[float]]
"""Samples of one cell, by the process that took them."""


def ratio_interval(
    new: Processes, old: Processes, seed: int = 0, noise: float = PROCESS_NOISE
) -> tuple[float, float, float]:
    """(ratio, low, high): median(new) / median(old) of the processes' medians, with its 95 % interval.

    Args:
        noise: by how much processes may differ, as a share; counts with fewer than three a side.

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
    if min(len(new), len(old)) < ENOUGH_PROCESSES:
        low, high = low / (1 + noise), high * (1 + noise)
    return pooled_median(new) / pooled_median(old), float(low), float(high)


def pooled_median(processes: Processes) -> float:
    """The median of the processes' medians."""
    return float(np.median([np.median(samples) for samples in processes]))


def _resampled_medians(samples: list[float], generator: np.random.Generator) -> np.ndarray:
    values = np.asarray(samples)
    return np.median(values[generator.integers(0, values.size, (_RESAMPLES, values.size))], axis=1)


def shown_noise(cells: Iterable[Processes]) -> float:
    """How far apart processes of one cell, or the steps of one process, lie: the most of ``cells``, as a share.

    Of steps the 10th and the 90th percentile count, as a machine whose steps differ that much has processes that do.
    """
    spreads = [PROCESS_NOISE]
    for processes in cells:
        medians = [float(np.median(samples)) for samples in processes]
        spreads.append(max(medians) / min(medians) - 1)
        for samples in processes:
            low, high = np.percentile(samples, (10, 90))
            spreads.append(float(high / low) - 1)
    return max(spreads)


def verdict(low: float, high: float, margin: float = MARGIN) -> str:
    """The word for an interval of time ratios (new / old): see the module's docstring."""
    if 1 - margin <= low and high <= 1 + margin:
        return "same"
    if high < 1 - margin:
        return "faster"
    if low > 1 + margin:
        return "slower"
    return "unclear"
