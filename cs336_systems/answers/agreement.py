"""Check that rows agree with their samples, with each other, and with the limits that they are shares of.

A row's statistics are recomputed from its samples. Derived metrics store none, so theirs are reconstructed: those of a
rate from the samples of its time in the same outcome, up to a constant amount of work; those of a part from the samples
of the whole; one or two samples from the statistics themselves. Rows of one outcome must agree: a rate times its time
is the tokens of a step (except for others' steps of conversations, which have fewer), a share times its limit is its
rate, and no share of a peak exceeds 100 %.

    for sentence in contradictions(read_rows(path)): print(sentence)
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from cs336_systems.experiments.training import TRL
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.record import RESULT, STATISTICS
from cs336_systems.harness.runs import RATES

_TIMES = (
    RATES
    | {"matmul_tflops": "matmul"}
    | {f"{time}_{rate}": time for time in ("forward", "backward") for rate in ("bandwidth", "copy_share")}
)
"""Derived metrics that are an amount of work per time, with the metric of that time."""

_PARTS = dict.fromkeys(("useful_tokens_per_s", "targets_per_s"), "tokens_per_s")
"""Derived metrics whose samples are a constant share of another metric's: steps of conversations differ in tokens."""

_BY_ROUND = ("exposed", "exposed_share")
"""Derived metrics per round; they cannot be checked, as rows do not record rounds."""

_ROUNDING = 4e-6
"""Tolerance of statistics, relative to the largest sample: samples and statistics are stored with seven digits."""

_AGREEMENT = 1e-5
"""Relative tolerance of products and quotients of numbers with seven digits."""

_SHARES: Mapping[str, tuple[str, str | None]] = (
    {"mfu": ("model_tflops", None), "simulated_mfu": ("simulated_model_tflops", None)}
    | {f"{time}_peak_share": (f"{time}_tflops", None) for time in ("forward", "backward", "both")}
    | {"matmul_ceiling_share": ("model_tflops", "matmul_ceiling")}
    | {"optimizer_copy_share": ("optimizer_bandwidth", "copy_ceiling")}
    | {f"{time}_copy_share": (f"{time}_bandwidth", "copy") for time in ("forward", "backward")}
)
"""By metric that is a share: its rate, and the metric of its limit, or None for the device's published peak."""

_AT_MOST_ALL = (*("light", "speed_of_light", "hfu"), *(share for share, (_, limit) in _SHARES.items() if limit is None))
"""Metrics that are shares, in percent, of limits that cannot be exceeded."""


def contradictions(rows: pd.DataFrame) -> list[str]:
    """Return a sentence for each statistic that contradicts rows' samples, and for each way in which rows disagree."""
    outcome = _outcomes(rows)
    samples = _samples(rows, outcome)
    borne_out = samples.map(len) > 0
    unfounded = (rows["metric"] != "") & ~borne_out & ~rows["metric"].isin(_BY_ROUND)
    found = [where(unfounded, "keep no samples, and follow from none")]
    own, samples = rows[borne_out], samples[borne_out]
    expected = _statistics(samples)
    tolerance = _ROUNDING * samples.map(lambda each: np.abs(each).max())
    for name in STATISTICS:
        found.append(_unequal(own[name], expected[name], tolerance, f"here {name}", "that of the samples", len(rows)))
    return list(filter(None, [*found, *_disagreements(rows, outcome)]))


def _outcomes(rows: pd.DataFrame) -> pd.Series:
    """Number each row's outcome; the rows of an outcome are adjacent and differ only in their results."""
    shared = rows[[name for name in rows if name not in RESULT]]
    return (shared != shared.shift()).any(axis=1).cumsum()


def _samples(rows: pd.DataFrame, outcome: pd.Series) -> pd.Series:
    """Return the samples of each row, stored or reconstructed; empty if neither is possible."""
    found = rows["samples"].copy()
    kept = found.map(len) > 0
    by_metric = dict(zip(zip(outcome[kept], rows["metric"][kept], strict=True), found[kept], strict=True))
    derived = rows[~kept & (rows["metric"] != "")]
    for row, metric, median, p10, p90, n in derived[["metric", "median", "p10", "p90", "n"]].itertuples(name=None):
        if (whole := by_metric.get((outcome[row], _TIMES.get(metric) or _PARTS.get(metric)))) is not None:
            rates = 1 / np.asarray(whole) if metric in _TIMES else np.asarray(whole)
            found[row] = list(rates * (median / np.median(rates)))
        elif n in (1, 2):  # p10 and p90 of two samples are a tenth of their distance inside them
            found[row] = [median + sign * (n - 1) * (p90 - p10) / 1.6 for sign in (-1, 1)][: int(n)]
    return found


def _statistics(samples: pd.Series) -> pd.DataFrame:
    """Return the statistics that ``Metric.statistics`` computes for each list of samples, without rounding.

    Raises:
        ValueError: a sample is not finite.
    """
    lengths = samples.map(len).to_numpy()
    found = {name: np.full(len(samples), np.nan) for name in STATISTICS} | {"n": lengths}
    for n in np.unique(lengths):
        alike = lengths == n
        values = np.array(samples[alike].tolist())
        if not np.isfinite(values).all():
            raise ValueError(f"samples of {n} values from line {_line(samples.index[alike][0])} on are not finite")
        found["p10"][alike], found["median"][alike], found["p90"][alike] = np.percentile(values, (10, 50, 90), axis=1)
        found["mean"][alike] = values.mean(axis=1)
        if n > 1:
            found["std"][alike] = values.std(axis=1, ddof=1)
    return pd.DataFrame(found, samples.index)


def _disagreements(rows: pd.DataFrame, outcome: pd.Series) -> list[str]:
    """Return a sentence for each metric that disagrees with others of its outcome or with its settings."""
    medians = {str(metric): own for metric, own in rows["median"].groupby(rows["metric"])}
    known = _SHARES.keys() & medians.keys()

    def beside(row: pd.Series, values: pd.Series) -> pd.Series:
        """Return for each of these rows the value of another metric in the same outcome."""
        return (
            pd.Series(dict(zip(outcome[values.index], values, strict=True)))
            .reindex(outcome[row.index])
            .set_axis(row.index)
        )

    found, planned = [], _tokens_of_settings(rows)
    if "planned_tokens_per_step" in medians:
        planned = beside(rows["median"], medians["planned_tokens_per_step"]).fillna(planned)
    packed_by_others = rows["how"].isin(TRL) if "how" in rows else pd.Series(False, rows.index)
    for rate, time in (("tokens_per_s", "step"), ("simulated_tokens_per_s", "simulated_step")):
        if {rate, time} <= medians.keys():
            times = rows["samples"][medians[time].index].map(lambda samples: float(np.median(1 / np.array(samples))))
            rates = medians[rate][~packed_by_others]
            tokens = rates / beside(rates, times) / 1e3
            words = f"here {rate} times {time}", "the tokens of a step"
            found.append(_unequal(tokens, planned[tokens.index], _AGREEMENT * tokens, *words, len(rows)))
    for share, (rate, limit) in ((name, _SHARES[name]) for name in sorted(known)):
        limits = _peaks(rows) if limit is None else medians.get(limit, pd.Series(dtype=float)).unique()
        if rate in medians and len(limits):
            own, rates = medians[share], beside(medians[share], medians[rate])
            by_limit = pd.DataFrame({limit: 100 * rates / limit for limit in limits})
            nearest = by_limit.sub(own, axis=0).abs().to_numpy().argmin(axis=1)
            expected = pd.Series(by_limit.to_numpy()[np.arange(len(own)), nearest], own.index)
            words = f"here {share}", f"{rate} over its limit"
            found.append(_unequal(own, expected, _AGREEMENT * expected, *words, len(rows)))
    return [*found, where(rows["metric"].isin(_AT_MOST_ALL) & (rows["p90"] > 100), "are above 100 % of a limit")]


def _tokens_of_settings(rows: pd.DataFrame) -> pd.Series:
    """Return the tokens of a step by each row's settings; NaN if they do not determine it."""
    names = [name for name in ("batch_size", "context_length", "accumulate", "world_size") if name in rows]
    names = ["total_batch_tokens"] if "total_batch_tokens" in rows else names
    tokens = rows[names].apply(pd.to_numeric, errors="coerce").prod(axis=1, skipna=False)
    for name in {"tensor", "context", "pipeline"} & set(rows):  # ranks along these dimensions share a batch
        tokens /= pd.to_numeric(rows[name])
    return tokens


def _peaks(rows: pd.DataFrame) -> list[float]:
    """Return the published peaks of the rows' devices in TFLOP/s, for one device and for all ranks of a step."""
    devices = filter(None, map(find_hardware, rows["gpu"].unique()))
    together = {1, *(map(int, rows["ranks"].dropna()) if "ranks" in rows else ())}
    return [n * peak / 1e12 for device in devices for peak in device.peak_flops.values() if peak for n in together]


def _unequal(own: pd.Series, expected: pd.Series, tolerance: pd.Series, what: str, standard: str, n_rows: int) -> str:
    """Return a sentence for values that differ from the expected ones; empty if none does."""
    wrong = ~((own - expected).abs() <= tolerance) & ~(own.isna() & expected.isna())
    if not wrong.any():
        return ""
    first = int(np.argmax(wrong))
    values = f"{what} is {own.iloc[first]:g} and {standard} {expected.iloc[first]:g}"
    return f"line {_line(own.index[first])}: in {wrong.sum()} of {n_rows} rows, {values}"


def where(which: pd.Series, what: str) -> str:
    """Return a sentence for the rows selected by a mask; empty if there are none."""
    if not which.any():
        return ""
    return f"line {_line(which.index[int(np.argmax(which))])}: {which.sum()} of {len(which)} rows {what}"


def _line(position: int) -> int:
    """Return a row's line number in its file, whose first line is the header."""
    return position + 2
