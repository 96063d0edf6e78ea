"""The table of ``--compare``: the newest runs of the same cells in two files, with a verdict for each phase.

The ratio of medians gets a 95 % interval from the bootstrap (Efron 1979: resample both sides, take the ratio, repeat).
Samples of one process do not show how much processes differ from each other, so whole processes are resampled, too. The
verdict compares the interval with a margin of two percent:

    same     the interval lies inside the margin
    faster   the interval lies wholly below 1 - margin
    slower   the interval lies wholly above 1 + margin
    unclear  anything else, and everything where a side has fewer than three processes (``--repeat 3``)

What statistics cannot show is listed beside the table: another machine, driver or commit, and a machine that was busy
with something else.
"""

import json

import numpy as np
import pandas as pd

from cs336_systems.harness.record import schema_columns
from cs336_systems.harness.runs import newest_run
from cs336_systems.report.tables import Table, settings_split

MARGIN = 0.02
"""The largest relative difference that counts as none."""

ENOUGH_PROCESSES = 3
"""The fewest processes that show how much processes differ."""

_RESAMPLES = 2000

Processes = list[list[float]]
"""Samples of one cell, by the process that took them."""

_IDENTITY = ("gpu", "host", "driver", "cuda", "torch", "triton", "commit", "dirty")
_FIGURES = ("old ms", "new ms", "processes", "new / old", "95 % interval", "verdict")
_RANKS = {"metric": 0, "verdict": 0, "new / old": 0, "95 % interval": 1, "new ms": 2, "old ms": 2, "processes": 3}


def compare(new: pd.DataFrame, old: pd.DataFrame) -> Table:
    """Compare each phase of every cell in both frames: old ms, new ms, processes, ratio, interval, verdict.

    The repeats of a cell's newest run count as its processes. Cells that only one side measured are counted in the
    caption, and differences of machine and versions are listed there.
    """
    beside = {*schema_columns(()), "repeat", "steps"}
    keys = [str(column) for column in new if column not in beside and column in old] + ["metric"]
    sides = [_timings(frame, keys) for frame in (new, old)]
    shared = [key for key in sides[0] if key in sides[1]]
    lines = []
    for key in shared:
        now, before = (side[key] for side in sides)
        ratio, low, high = ratio_interval(now, before)
        medians = (f"{pooled_median(side):.3f}" for side in (before, now))
        word = verdict(low, high) if min(len(now), len(before)) >= ENOUGH_PROCESSES else "unclear"
        lines.append((*key, *medians, f"{len(before)}, {len(now)}", f"{ratio:.3f}", f"{low:.3f}–{high:.3f}", word))
    notes = [] if shared else ["no timing is in both"]
    notes += [
        f"timings in the {name} rows only: {len(side.keys() - set(shared))}"
        for side, name in zip(sides, ("new", "old"), strict=True)
    ]
    notes += [
        f"{column}: {', '.join(map(str, olds))} -> {', '.join(map(str, news))}"
        for column in _IDENTITY
        if shared and (olds := sorted(set(old[column]))) != (news := sorted(set(new[column])))
    ]
    notes += [f"{name} rows: {load}" for name, frame in (("old", old), ("new", new)) if (load := overload(frame))]
    frame = pd.DataFrame(lines, columns=[*keys, *_FIGURES])
    caption, varying = settings_split(frame, keys[:-1]) if shared else ("", [])
    few = any(min(len(side[key]) for side in sides) < ENOUGH_PROCESSES for key in shared)
    return Table(
        "; ".join([caption, *notes] if caption else notes),
        frame[[*varying, "metric", *_FIGURES]],
        {"verdict": f"it takes {ENOUGH_PROCESSES} processes a side, as --repeat {ENOUGH_PROCESSES} starts"}
        if few
        else {},
        dict.fromkeys(varying, 0) | _RANKS,
    )


def _timings(frame: pd.DataFrame, keys: list[str]) -> dict[tuple, Processes]:
    """Return samples in ms by cell and metric, a list per process of the newest run; failed runs have none."""
    timings: dict[tuple, Processes] = {}
    for key, cell in frame.groupby([frame[name].astype(str) for name in keys[:-1]], sort=False):
        run = newest_run(cell)
        for metric, rows in run[(run["unit"] == "ms") & (run["metric"] != "warmup_step")].groupby("metric", sort=False):
            if samples := [found for found in rows["samples"] if found]:
                timings[*key, str(metric)] = samples
    return timings


def overload(frame: pd.DataFrame, per_core: float = 1.0) -> str:
    """Describe the highest load at the start of a cell; empty if it was at most ``per_core`` processes per core."""
    busiest = (0.0, 1)
    for host, state in frame[["host", "state_before"]].drop_duplicates().itertuples(index=False):
        cores = host.removesuffix(" cores").rpartition(" ")[2]
        load = json.loads(state or "{}").get("load_1min")
        if load is not None and cores.isdigit():
            busiest = max(busiest, (load, int(cores)), key=lambda found: found[0] / found[1])
    load, cores = busiest
    return f"the machine was loaded, {load:.1f} processes on {cores} cores" if load > per_core * cores else ""


def ratio_interval(new: Processes, old: Processes) -> tuple[float, float, float]:
    """Return (ratio, low, high): the ratio new / old of the medians of processes' medians, and its 95 % interval.

    Raises:
        ValueError: either side has no samples.
    """
    if not (new and old and all(new) and all(old)):
        raise ValueError(f"a ratio needs samples on both sides, got {new} and {old}")
    generator = np.random.default_rng(0)

    def resampled(processes: Processes) -> np.ndarray:
        medians = np.stack([_resampled_medians(samples, generator) for samples in processes])
        chosen = generator.integers(0, len(processes), (len(processes), _RESAMPLES))
        return np.median(medians[chosen, np.arange(_RESAMPLES)], axis=0)

    low, high = np.percentile(resampled(new) / resampled(old), (2.5, 97.5))
    return pooled_median(new) / pooled_median(old), float(low), float(high)


def pooled_median(processes: Processes) -> float:
    return float(np.median([np.median(samples) for samples in processes]))


def _resampled_medians(samples: list[float], generator: np.random.Generator) -> np.ndarray:
    values = np.asarray(samples)
    return np.median(values[generator.integers(0, values.size, (_RESAMPLES, values.size))], axis=1)


def verdict(low: float, high: float) -> str:
    """Return the verdict (module docstring) on an interval of time ratios new / old, given enough processes."""
    if low >= 1 - MARGIN and high <= 1 + MARGIN:
        return "same"
    if high < 1 - MARGIN:
        return "faster"
    return "slower" if low > 1 + MARGIN else "unclear"
