"""Tables of attention benchmarks: one line per implementation and shape."""

import pandas as pd

from cs336_systems.costs.attention import AttentionWork
from cs336_systems.experiments.attention.cells import Clock
from cs336_systems.experiments.attention.measure import TILE
from cs336_systems.harness.runs import by_repeat, newest, newest_run
from cs336_systems.report.results import MAIN, Column, Line, ResultTable
from cs336_systems.report.tables import Table, digits

PASSES = ("forward", "backward", "both")
SETTINGS = (
    *("gpu", "device", "grid", "dtype", "batch_size", "heads", "d_head", "length", "causal", "mask", "impl"),
    "clock",
)
"""Columns that tell one cell from another."""


def by_clock(rows: pd.DataFrame, clock: Clock = "harness") -> pd.DataFrame:
    """The rows whose times one clock took: what is compared."""
    return rows[rows["clock"] == clock]


def _largest_error(line: Line) -> float | None:
    return max((float(row["median"]) for name, row in line.metrics.items() if name.startswith("error_")), default=None)


ATTENTION = ResultTable(
    settings=SETTINGS,
    always=("impl",),
    columns=(
        *(Column(f"{name} ms", name, rank=MAIN if name == "both" else 1) for name in PASSES),
        *(Column(f"{name} TFLOP/s", f"{name}_tflops", rank=1 if name == "both" else 2) for name in PASSES),
        Column("scores seen %", "seen_scores", optional=True, rank=2),
        Column("blocks skipped %", "skipped_blocks", optional=True, rank=2),
        Column("mask GiB", "mask_memory", optional=True, rank=2),
        Column("kept GiB", "kept_for_backward", note="what forward leaves for backward", rank=2),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak_memory", rank=3),
        Column("largest error", _largest_error, ".1e", rank=2, note="of the output and the gradients, relative"),
    ),
)
"""Time, rate, memory and largest error of every cell of ``benchmark_attention.py`` rows; failures as they are."""


def comparison_table(rows: pd.DataFrame, ours: str = "flash") -> Table:
    """Forward, backward and both of ``ours`` at each shape of one run, and every other's ``time_over`` it."""
    rows = by_clock(rows)
    settings = ["batch_size", "heads", "length", "d_head"]
    ran = rows[(rows["status"] == "ok") & rows["metric"].isin(PASSES)]
    lines = []
    for shape, at_shape in ran.groupby(settings, sort=False):
        impls = [str(impl) for impl in at_shape["impl"].unique() if impl != ours]
        for name in PASSES:
            line = dict(zip(("batch", "heads", "length", "d"), shape, strict=True)) | {"pass": name}
            line[f"{ours} ms"] = digits(time_of(at_shape, name, ours))
            line |= {f"{impl} / {ours}": f"{time_over(at_shape, name, impl, ours):.2f}" for impl in impls}
            lines.append(line)
    return Table("", pd.DataFrame(lines))


def time_of(rows: pd.DataFrame, metric: str, impl: str) -> float:
    """Of a pass at one shape, in ms: the median over the repeats of the newest run.

    Raises:
        ValueError: the rows do not hold it.
    """
    return float(_by_repeat(rows, metric, impl).median())


def time_over(rows: pd.DataFrame, metric: str, impl: str, ours: str) -> float:
    """Of a pass at one shape: the time of ``impl`` over that of ``ours``, the median over the repeats of newest runs.

    Raises:
        ValueError: the rows do not hold them.
    """
    return float((_by_repeat(rows, metric, impl) / _by_repeat(rows, metric, ours)).median())


def _by_repeat(rows: pd.DataFrame, metric: str, impl: str) -> pd.Series:
    rows = by_clock(rows)
    own = rows[(rows["impl"] == impl) & (rows["metric"] == metric)]
    if own.empty:
        raise ValueError(f"no row holds the metric {metric!r} of {impl!r}")
    return by_repeat(newest_run(own), metric)


def length_tables(rows: pd.DataFrame, *metrics: str) -> list[Table]:
    """A table per metric: its median for every implementation (columns) at every dtype, head dim and length (lines).

    A cell that has no such metric says how it ended instead; one that was not measured is empty.
    """
    impls = list(dict.fromkeys(rows["impl"]))
    rows = newest(by_clock(rows), [name for name in SETTINGS if name in rows])
    return [_length_table(rows, impls, metric) for metric in metrics]


def _length_table(rows: pd.DataFrame, impls: list[str], metric: str) -> Table:
    lines = []
    for (dtype, d_head, length), cells in rows.groupby(["dtype", "d_head", "length"], sort=True):
        line = {"dtype": dtype, "d": d_head, "length": f"{length:,}"}
        for impl in impls:
            own = cells[cells["impl"] == impl]
            found = own[own["metric"] == metric]["median"]
            ended = "" if own.empty else own["status"].iloc[-1]
            line[impl] = digits(found.iloc[-1]) if len(found) else ended
        lines.append(line)
    return Table("", pd.DataFrame(lines))


def account_table(work: AttentionWork, bytes_per_element: int) -> Table:
    """What materialised attention needs at its peak, tensor by tensor, eager and compiled."""
    scores = work.n_scores * bytes_per_element
    inputs = work.tensor_bytes(bytes_per_element)
    eager, compiled = (work.materialised_bytes(bytes_per_element, compiled=how) for how in (False, True))
    lines = [
        ("one score matrix", scores, scores),
        ("score matrices at the height of backward", 4 * scores, 2 * scores),
        ("q, k, v, o and their gradients", inputs, inputs),
        ("scaled queries, mask", eager - 4 * scores - inputs, compiled - 2 * scores - inputs),
        ("all", eager, compiled),
    ]
    return Table(
        f"Batch {work.batch_size}, {work.heads} head, length {work.n_queries:,}, d {work.d_head}; GiB.",
        pd.DataFrame(
            {"tensor": what, "eager": digits(a / 2**30), "compiled": digits(b / 2**30)} for what, a, b in lines
        ),
    )


def tile_table(rows: pd.DataFrame, most: int | None = None) -> Table:
    """The tiles that ``--autotune`` timed, fastest first for each kernel and shape; ``most`` of them."""
    rows = newest(rows, [name for name in SETTINGS if name in rows])
    tiles = rows[rows["metric"].astype(str).str.startswith(TILE)]
    lines = []
    for shape, at_shape in tiles.groupby(["dtype", "batch_size", "heads", "d_head", "length"], sort=False):
        named = at_shape["metric"].str.removeprefix(TILE).str.split(" ", n=1, expand=True)
        for kernel, of_kernel in at_shape.assign(kernel=named[0], tile=named[1]).groupby("kernel", sort=False):
            by_time = of_kernel.sort_values("median")
            for _, row in by_time.head(most or len(by_time)).iterrows():
                lines.append(
                    dict(zip(("dtype", "batch", "heads", "d", "length"), shape, strict=True))
                    | {"kernel": kernel, "tile": row["tile"], "ms": digits(row["median"])}
                    | {"of the fastest": f"{row['median'] / by_time['median'].iloc[0]:.3f}"}
                )
    return Table("", pd.DataFrame(lines))
