"""Which rows count: for every cell those of its newest run, repeats pooled; for tables, figures, comparisons.

A *run* is what one command wrote about one cell. Its rows follow each other in their file; they say the same ``argv``
and ``commit``, and their repeats count up. The same command given again starts at repeat 0 again, and that is how its
rows are told from those before. A cell whose newest outcome failed is that failure: no earlier success hides it.

A rate is an amount of work over a time. Rows hold the statistics of the samples' rates, and the median of the rates of
an even number of samples is not the rate of the median time; pooled, each rate of ``RATES`` is the amount over the
time that is shown beside it.
"""

from collections import Counter

import numpy as np
import pandas as pd

RATES = (
    dict.fromkeys(("tokens_per_s", "model_tflops", "mfu", "mfu_palm", "hfu", "light", "speed_of_light"), "step")
    | dict.fromkeys(("matmul_ceiling_share", "simulated_over_measured", "tflops"), "step")
    | dict.fromkeys(("optimizer_bandwidth", "optimizer_copy_share"), "optimizer")
    | dict.fromkeys(("algbw", "busbw"), "time")
    | {f"{time}_{rate}": time for time in ("forward", "backward", "both") for rate in ("tflops", "peak_share")}
    | {f"{time}_model_tflops": time for time in ("forward", "backward")}
)
"""Metrics that are an amount over a time, with the metric of that time."""

_WRITTEN = ("argv", "commit", "timestamp")


def newest_run(cell: pd.DataFrame) -> pd.DataFrame:
    """The rows of the newest run of a cell: those that are ok if its last outcome is, else that outcome's row alone.

    Args:
        cell: rows of one cell, or of one metric of it, in the order in which they were written.
    """
    repeat = repeats(cell)
    if cell["metric"].is_unique and all(
        map(_is_constant, (repeat, *(cell[name] for name in _WRITTEN if name in cell)))
    ):
        return cell  # measured once: no more to tell apart, in nearly every cell
    written = (cell[name].fillna("") if name in cell else [""] * len(cell) for name in _WRITTEN)
    counted: Counter[tuple] = Counter()
    first, before = 0, None
    for row, (argv, commit, timestamp, number, metric) in enumerate(zip(*written, repeat, cell["metric"], strict=True)):
        outcome = (argv, commit, timestamp, number)
        again = (*outcome, counted[*outcome, metric])
        counted[*outcome, metric] += 1
        if before and again != before and not ((argv, commit) == before[:2] and number > before[3]):
            first = row
        before = again
    run = cell.iloc[first:]
    return run[run["status"] == "ok"] if run["status"].iloc[-1] == "ok" else run.iloc[-1:]


def _is_constant(values: pd.Series) -> bool:
    array = values.to_numpy()
    return bool((array == array[0]).all())


def repeats(rows: pd.DataFrame) -> pd.Series:
    """The repeat in which each row was measured, 0 where a benchmark has none."""
    numbers = rows.get("repeat", pd.Series(0, index=rows.index))
    return pd.to_numeric(numbers, errors="coerce").fillna(0).astype(int)


def pooled(run: pd.DataFrame) -> pd.DataFrame:
    """One row per metric of a run: the median of the repeats' medians, the lowest p10, the highest p90, n in all."""
    rows = run.drop_duplicates("metric", keep="last").set_index("metric", drop=False)
    if len(rows) < len(run):
        by_metric = run.groupby("metric", sort=False)
        for column, pool in (("median", "median"), ("p10", "min"), ("p90", "max"), ("n", "sum")):
            if column in rows:
                rows[column] = by_metric[column].agg(pool)
    inverses = {time: _inverse_times(run, time) for time in set(RATES.values()) & set(rows.index)}
    if any(inverses.values()):
        medians: dict[str, list[float]] = {}
        for metric, median in zip(run["metric"], run["median"], strict=True):
            medians.setdefault(metric, []).append(median)
        shown, places = ["median", "p10", "p90"], {metric: place for place, metric in enumerate(rows.index)}
        values = rows[shown].to_numpy(dtype=float, copy=True)
        for rate, time in RATES.items():
            if rate in places and (of_one_unit := inverses.get(time)) and len(of_one_unit) == len(medians[rate]):
                median, p10, p90 = values[places[time]]
                values[places[rate]] = np.median(np.divide(medians[rate], of_one_unit)) / np.array([median, p90, p10])
        rows[shown] = values
    return rows.drop(columns="samples", errors="ignore").reset_index(drop=True)


def _inverse_times(run: pd.DataFrame, time: str) -> list[float]:
    """The median of 1 / time over the samples of each repeat: the rate of one unit of work; empty without samples."""
    if "samples" not in run:
        return []
    return [float(np.median(1 / np.asarray(found))) for found in run["samples"][run["metric"] == time] if found]


def newest(rows: pd.DataFrame, settings: list[str]) -> pd.DataFrame:
    """Only the newest run of each cell, pooled: one row per metric, or one row for a failed cell.

    Args:
        settings: the columns that tell one cell from another.
    """
    runs = [pooled(newest_run(cell)) for _, cell in rows.groupby(settings, sort=False, dropna=False)]
    return pd.concat(runs, ignore_index=True) if runs else rows


def by_repeat(run: pd.DataFrame, metric: str) -> pd.Series:
    """The median of a metric in each repeat of a run."""
    own = run[run["metric"] == metric]
    return pd.Series(own["median"].to_numpy(), index=repeats(own))
