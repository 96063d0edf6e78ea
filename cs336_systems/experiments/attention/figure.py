"""Attention against sequence length: what grows with the square of it, and what with the length alone, as PNG."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from cs336_systems.experiments.attention.table import by_clock
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, PLAIN, dress

_COLOURS = (*OKABE_ITO, "#999999", "#882255")
_MARKERS = "osD^vPX*h"
_NO_MEMORY = {"oom": ("x", "ran out of memory"), "predicted-oom": ("o", "not run: would not fit")}
"""Marker and meaning of cells that memory ended; they stand at the top edge, in the colour of their line."""
_ROOM = 0.86
"""Share of an axis that the lines take; above them stands what memory ended."""
_SHAPE = ("gpu", "device", "dtype", "batch_size", "heads", "d_head", "causal")


def scaling_figure(rows: pd.DataFrame) -> Figure | None:
    """Milliseconds of forward and backward (left) and MiB kept between them (right) at each length.

    Lengths for which memory did not suffice stand at the top edge.

    Args:
        rows: of ``benchmark_attention.py``, all of one dtype, batch, number of heads and head dim.

    Raises:
        ValueError: rows of several dtypes or shapes.
    """
    cells = newest(by_clock(rows), [*_SHAPE, "length", "impl"])
    ran = cells[(cells["status"] == "ok") & cells["metric"].isin(("both", "kept_for_backward"))]
    if ran.empty:
        return None
    ended = cells[cells["status"].isin(_NO_MEMORY) & cells["impl"].isin(ran["impl"])]
    shapes = ran[list(_SHAPE)].drop_duplicates()
    if len(shapes) > 1:
        raise ValueError(f"a figure of attention against length takes one shape, got {shapes.to_dict('records')}")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    colours: dict[str, str] = {}
    for i, (impl, own) in enumerate(ran.groupby("impl", sort=False)):
        colours[str(impl)] = _COLOURS[i % len(_COLOURS)]
        style = {"color": colours[str(impl)], "marker": _MARKERS[i % len(_MARKERS)], "label": str(impl)}
        for axes, metric, scale in ((time_axes, "both", 1), (memory_axes, "kept_for_backward", 1024)):
            line = own[own["metric"] == metric].sort_values("length")
            axes.plot(line["length"], scale * line["median"].astype(float), markersize=5, linewidth=1.5, **style)
    kept = ran[ran["metric"] == "kept_for_backward"]
    _guide(memory_axes, kept, 2)
    _guide(memory_axes, kept, 1)
    for axes, label in (
        (time_axes, "forward and backward, ms (median)"),
        (memory_axes, "kept by forward for backward, MiB"),
    ):
        _dress(axes, sorted({*ran["length"], *ended["length"]}), label)
        _mark_ended(axes, ended, colours)
    handles = [*time_axes.get_legend_handles_labels()[0], *_meanings(ended)]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    first = ran.iloc[0]
    heads = f", {first['heads']} heads" if first["heads"] else ""
    causal = ", causal" if first["causal"] else ""
    figure.suptitle(
        f"Attention on {first['gpu'] or first['device']}: batch {first['batch_size']}{heads}, d {first['d_head']}, "
        f"{first['dtype']}{causal}",
        fontsize=11,
    )
    return figure


def _guide(axes: Axes, kept: pd.DataFrame, power: int) -> None:
    """A dashed line below the implementation whose bytes grow most like a power of the length, if one does."""
    growing = kept.groupby("impl").filter(lambda own: own["length"].nunique() > 1 and round(_growth(own)) == power)
    if growing.empty:
        return
    longest = growing[growing["length"] == growing["length"].max()].sort_values("median")
    end = longest.iloc[-1 if power == 2 else 0]
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


def _growth(own: pd.DataFrame) -> float:
    """The power of the length with which the bytes of one implementation grow, between its two longest."""
    (first, before), (last, after) = own.sort_values("length")[["length", "median"]].to_numpy(float)[-2:]
    return math.log(after / before) / math.log(last / first)


def _mark_ended(axes: Axes, ended: pd.DataFrame, colours: dict[str, str]) -> None:
    """A marker at the top edge for every length that memory did not suffice for; implementations below each other."""
    if ended.empty:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, bottom * (top / bottom) ** (1 / _ROOM))
    for row, impl in enumerate(impl for impl in colours if (ended["impl"] == impl).any()):
        for status, (marker, _) in _NO_MEMORY.items():
            lengths = ended[(ended["impl"] == impl) & (ended["status"] == status)]["length"]
            axes.plot(
                lengths,
                [0.97 - 0.05 * row] * len(lengths),
                linestyle="",
                marker=marker,
                color=colours[impl],
                fillstyle="none",
                transform=axes.get_xaxis_transform(),
                label=f"_{impl} {status}",
            )


def _meanings(ended: pd.DataFrame) -> list[Line2D]:
    """Legend entries of the markers at the top edge."""
    return [
        Line2D([], [], linestyle="", marker=marker, color="0.4", fillstyle="none", label=meaning)
        for status, (marker, meaning) in _NO_MEMORY.items()
        if (ended["status"] == status).any()
    ]


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
