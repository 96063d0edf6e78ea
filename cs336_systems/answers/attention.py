"""Tables and numbers about attention by itself, from the parts of ``scripts/measure_attention.sh``."""

import pandas as pd

from cs336_systems.answers.committed import caption
from cs336_systems.costs.attention import AttentionWork
from cs336_systems.experiments.attention import PASSES, SETTINGS, Clock, by_clock
from cs336_systems.harness.runs import newest
from cs336_systems.report.tables import Table, digits

PLAIN, COMPILED, FLASH, HOPPER = "reference", "reference-compiled", "flash", "hopper"
ON_ONE_HOST = [PLAIN, FLASH, HOPPER, "sdpa-cudnn"]
"""Implementations whose newest rows of the grids against length are of one host; rows of all others are older."""
_SETTINGS = ["batch_size", "dtype", "causal"]


def handout_attention(length: int) -> AttentionWork:
    """The handout's least demanding configuration at a length: batch 8, one head, d 16, not causal."""
    return AttentionWork(8, 1, 1, length, length, 16, causal=False)


def flash_speedups(rows: pd.DataFrame) -> list[float]:
    """Materialised attention over flash, forward and backward, of every shape that both ran."""
    rows = _newest(rows)
    rows = rows[rows["metric"] == "both"]
    times = rows.pivot_table(index=["d_head", "length"], columns="impl", values="median", aggfunc="last")
    return list((times[PLAIN] / times[FLASH]).dropna())


def _newest(rows: pd.DataFrame, clock: Clock = "harness") -> pd.DataFrame:
    """What one clock took, of each cell its newest run with its repeats pooled."""
    return newest(by_clock(rows, clock), [name for name in SETTINGS if name in rows])


def materialised_table(rows: pd.DataFrame) -> Table:
    """The handout's grid: forward, backward, what forward keeps, the peak; and how a cell ended that did not run."""
    rows = _newest(rows)
    lines = []
    for (d_head, length), own in rows[rows["impl"] == PLAIN].groupby(["d_head", "length"], sort=True):
        found = own.set_index("metric")["median"]
        line = {"d": d_head, "length": f"{length:,}"}
        for label, metric in (
            ("forward ms", "forward"),
            ("backward ms", "backward"),
            ("kept for backward GiB", "kept_for_backward"),
            ("peak GiB", "peak_memory"),
        ):
            line[label] = digits(found[metric]) if metric in found else "–"
        lines.append(line | {"status": own["status"].iloc[-1]})
    passes = rows[rows["metric"].isin(PASSES)]
    return Table(caption(passes, _SETTINGS, "medians of {n} passes"), pd.DataFrame(lines))


def compiled_attention_table(rows: pd.DataFrame) -> Table:
    """The same grid eager and compiled."""
    return _sided(rows, (PLAIN, COMPILED), ("forward", "backward"))


def flash_table(rows: pd.DataFrame) -> Table:
    """Our kernels beside materialised PyTorch attention: forward, backward and both, and the ratio of both.

    The kernels for Hopper follow where they were measured. Where ``do_bench`` timed a cell too, its median stands in
    parentheses.
    """
    return _sided(rows, (PLAIN, FLASH), PASSES, beside=HOPPER)


def _sided(rows: pd.DataFrame, impls: tuple[str, str], passes: tuple[str, ...], beside: str = "") -> Table:
    rows, benched = _newest(rows), _newest(rows, "do-bench")
    do_bench = benched.groupby(["d_head", "length", "metric", "impl"])["median"].last()
    shown = [*impls, *({beside} & {*rows["impl"]})]
    lines = []
    for (d_head, length), own in rows.groupby(["d_head", "length"], sort=True):
        line = {"d": d_head, "length": f"{length:,}"}
        for name in passes:
            found = own[own["metric"] == name].groupby("impl")["median"].last()
            ended = own.groupby("impl")["status"].last()
            for impl in shown:
                benched_ms = do_bench.get((d_head, length, name, impl))
                text = digits(found[impl]) if impl in found else ended.get(impl, "not measured")
                line[f"{name} {impl}"] = text if benched_ms is None else f"{text} ({digits(benched_ms)})"
            both = all(impl in found for impl in impls)
            line[f"{name} ratio"] = f"{found[impls[0]] / found[impls[1]]:.2f}" if both else "–"
        lines.append(line)
    note = f"ms, medians of {{n}} passes; ratio: {impls[0]} over {impls[1]}"
    if len(do_bench):
        passes_timed = benched.loc[benched["metric"].isin(passes) & benched["impl"].isin(shown), "n"]
        note += "; in parentheses: by triton.testing.do_bench, which times what fits in 100 ms: "
        note += f"{passes_timed.min():g} to {passes_timed.max():g} passes"
    timed = rows[rows["metric"].isin(passes) & rows["impl"].isin(shown)]
    return Table(caption(timed, _SETTINGS, note), pd.DataFrame(lines))
