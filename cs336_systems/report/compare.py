"""The table of ``--compare``: what the newest runs of two files say of the same cells, with a verdict for each phase.

The statistics are ``harness/comparison.py``'s. What they cannot show is listed beside the table: another machine,
driver or commit, and a machine that was busy with something else.
"""

import json

import pandas as pd

from cs336_systems.harness import comparison
from cs336_systems.harness.record import schema_columns
from cs336_systems.harness.runs import newest_run
from cs336_systems.report.tables import Table, settings_split

_IDENTITY = ("gpu", "host", "driver", "cuda", "torch", "triton", "commit", "dirty")
_FIGURES = ("old ms", "new ms", "processes", "new / old", "95 % interval", "verdict")
_RANKS = {"metric": 0, "verdict": 0, "new / old": 0, "95 % interval": 1, "new ms": 2, "old ms": 2, "processes": 3}


def compare(new: pd.DataFrame, old: pd.DataFrame) -> Table:
    """One line per phase of every cell that both hold: old ms, new ms, ratio, interval, verdict.

    The repeats of a cell's newest run count as its processes. Cells that only one side measured are counted in the
    caption, and differences of machine and versions are listed there.
    """
    beside = {*schema_columns(()), "repeat", "steps"}
    keys = [str(column) for column in new if column not in beside and column in old] + ["metric"]
    sides = [_timings(frame, keys) for frame in (new, old)]
    shared = [key for key in sides[0] if key in sides[1]]
    noise = {
        metric: comparison.shown_noise(side[key] for key in shared for side in sides if key[-1] == metric)
        for metric in dict.fromkeys(key[-1] for key in shared)
    }
    lines = []
    for key in shared:
        now, before = (side[key] for side in sides)
        ratio, low, high = comparison.ratio_interval(now, before, noise=noise[key[-1]])
        figures = (
            *(*(f"{comparison.pooled_median(side):.3f}" for side in (before, now)), f"{len(before)}, {len(now)}"),
            *(f"{ratio:.3f}", f"{low:.3f}–{high:.3f}", comparison.verdict(low, high)),
        )
        lines.append(dict(zip((*keys, *_FIGURES), (*key, *figures), strict=True)))
    notes = [
        f"timings in the {name} rows only: {len(side.keys() - set(shared))}"
        for side, name in zip(sides, ("new", "old"), strict=True)
    ]
    notes += [
        f"{column}: {', '.join(map(str, olds))} -> {', '.join(map(str, news))}"
        for column in _IDENTITY
        if (olds := sorted(set(old[column]))) != (news := sorted(set(new[column])))
    ]
    notes += [f"{name} rows: {load}" for name, frame in (("old", old), ("new", new)) if (load := _overload(frame))]
    frame = pd.DataFrame(lines, columns=[*keys, *_FIGURES])
    caption, varying = settings_split(frame, keys[:-1])
    enough = comparison.ENOUGH_PROCESSES
    few = any(min(len(side[key]) for side in sides) < enough for key in shared)
    widened = ", ".join(f"{metric} {100 * share:.0f} %" for metric, share in noise.items())
    footnote = f"with fewer than {enough} processes a side, less than what processes may differ by is unclear"
    return Table(
        "; ".join([caption, *notes] if caption else notes),
        frame[[*varying, "metric", *_FIGURES]],
        {"verdict": f"{footnote}: {widened}"} if few else {},
        dict.fromkeys(varying, 0) | _RANKS,
    )


def _timings(frame: pd.DataFrame, keys: list[str]) -> dict[tuple, comparison.Processes]:
    """Time samples by cell and metric, a list for each process of the newest run; none of a run that failed."""
    timings: dict[tuple, comparison.Processes] = {}
    for key, cell in frame.groupby([frame[name].astype(str) for name in keys[:-1]], sort=False):
        run = newest_run(cell)
        for metric, rows in run[(run["unit"] == "ms") & (run["metric"] != "warmup_step")].groupby("metric", sort=False):
            if samples := [found for found in rows["samples"] if found]:
                timings[*key, str(metric)] = samples
    return timings


def _overload(frame: pd.DataFrame) -> str:
    """By how much the host was busier than its cores allow, at its busiest when a cell began; nothing if it was not."""
    busiest = (0.0, 1)
    for host, state in frame[["host", "state_before"]].drop_duplicates().itertuples(index=False):
        cores = host.removesuffix(" cores").rpartition(" ")[2]
        load = json.loads(state or "{}").get("load_1min")
        if load is not None and cores.isdigit():
            busiest = max(busiest, (load, int(cores)), key=lambda found: found[0] / found[1])
    load, cores = busiest
    return f"the machine was loaded, {load:.1f} processes on {cores} cores" if load > cores else ""
