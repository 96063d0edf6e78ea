"""Attention against sequence length: what grows with the square of it, and what with the length alone, as PNG."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, PLAIN, dress

_COLOURS = (*OKABE_ITO, "#999999")
_MARKERS = "osD^vPX*"
_SHAPE = ("gpu", "device", "dtype", "batch_size", "heads", "d_head", "causal")


def scaling_figure(rows: pd.DataFrame) -> Figure | None:
    """Milliseconds of forward and backward (left) and MiB kept between them (right) at each length.

    Args:
        rows: of ``benchmark_attention.py``, all of one dtype, batch, number of heads and head dim.

    Raises:
        ValueError: rows of several dtypes or shapes.
    """
    ran = newest(rows, [*_SHAPE, "length", "impl"])
    ran = ran[(ran["status"] == "ok") & ran["metric"].isin(("both", "kept_for_backward"))]
    if ran.empty:
        return None
    shapes = ran[list(_SHAPE)].drop_duplicates()
    if len(shapes) > 1:
        raise ValueError(f"a figure of attention against length takes one shape, got {shapes.to_dict('records')}")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for i, (impl, own) in enumerate(ran.groupby("impl", sort=False)):
        style = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)], "label": str(impl)}
        for axes, metric, scale in ((time_axes, "both", 1), (memory_axes, "kept_for_backward", 1024)):
            line = own[own["metric"] == metric].sort_values("length")
            axes.plot(line["length"], scale * line["median"].astype(float), markersize=5, linewidth=1.5, **style)
    kept = ran[ran["metric"] == "kept_for_backward"]
    longest = kept[kept["length"] == kept["length"].max()].sort_values("median")
    _guide(memory_axes, longest.iloc[-1], 2)
    _guide(memory_axes, longest.iloc[0], 1)
    for axes, label in (
        (time_axes, "forward and backward, ms (median)"),
        (memory_axes, "kept by forward for backward, MiB"),
    ):
        _dress(axes, sorted(ran["length"].unique()), label)
    figure.legend(*time_axes.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    first = ran.iloc[0]
    heads = f", {first['heads']} heads" if first["heads"] else ""
    causal = ", causal" if first["causal"] else ""
    figure.suptitle(
        f"Attention on {first['gpu'] or first['device']}: batch {first['batch_size']}{heads}, d {first['d_head']}, "
        f"{first['dtype']}{causal}",
        fontsize=11,
    )
    return figure


def _guide(axes: Axes, end: pd.Series, power: int) -> None:
    """A dashed line through a point that grows with a power of the length."""
    last, mib = float(end["length"]), 1024 * float(end["median"])
    lengths = [last / 16, last]
    below = 0.4  # of the point, so that the line is not hidden under what it explains
    axes.plot(lengths, [below * mib * (length / last) ** power for length in lengths], color="0.6", linestyle="--")
    axes.annotate(
        "∝ length²" if power == 2 else "∝ length",
        (lengths[0] * 2, below * mib / 8**power),
        xytext=(4, -8),
        textcoords="offset points",
        ha="left",
        va="center",
        color="0.4",
        fontsize=9,
    )


def _dress(axes: Axes, lengths: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, ha="right", fontsize=8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("sequence length, tokens")
    axes.set_ylabel(label)
    dress(axes)
