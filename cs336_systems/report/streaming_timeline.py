"""A step under memory caps as a picture: what each lane does, over the whole step and close up, as PNG.

    rows = timeline_rows(schedule.operations, times)         # a table, as files of benchmark_streaming.py hold it
    save(streaming_figure(rows, title), path)

Three lanes: copies in, kernels, copies out; times are simulated (``costs/streaming.py``) or measured. Above, the share
of each moment in which a lane is busy; below, single operations in the middle of the step, kernels with their layers.
White is waiting.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.costs.streaming import LANES, LaneTimes
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.streaming.schedule import Kind, Operation

_NAMES = {"in": "to the device", "compute": "kernels", "out": "to the host"}
_BLUE, _VERMILION, _GREEN, _PINK, _ORANGE, _SKY, _BLACK = OKABE_ITO
_KERNELS: dict[str, tuple[str, str]] = {
    Kind.FORWARD: ("forward", _SKY),
    Kind.BACKWARD: ("backward", _BLUE),
    Kind.RECOMPUTE: ("recomputed", _ORANGE),
    Kind.KEYS: ("recomputed", _ORANGE),
    Kind.RESTORE: ("recomputed", _ORANGE),
    Kind.HEAD: ("head and loss", "#999999"),
    Kind.OPTIMIZER: ("optimizer", _BLACK),
}
_COPIES = {
    "weights": ("weights", _GREEN),
    "gradients": ("gradients", _VERMILION),
    "input": ("kept: input, context", "#F0E442"),
    "context": ("kept: input, context", "#F0E442"),
    "attention": ("kept: attention", "#B8A000"),
    "products": ("kept: products", "#7A5C00"),
}
_MOMENTS = "moments", _PINK
_REST = "head and loss", "#999999"
_BINS = 300
_CLOSE_UP = 40
"""Kernels that are shown one by one."""


def timeline_rows(operations: Sequence[Operation], times: LaneTimes) -> pd.DataFrame:
    """A line for each operation of a step: its ``lane``, ``kind``, ``what`` a copy carries, ``layer``, ``start_s`` and
    ``end_s`` since the step began.
    """
    carried = [
        (*operation.reads, *operation.writes)[0].item.what if operation.n_bytes else "" for operation in operations
    ]
    columns = {
        "lane": list(times.lanes),
        "kind": [str(operation.kind) for operation in operations],
        "what": carried,
        "layer": [operation.layer for operation in operations],
        "start_s": np.round(times.starts, 6),
        "end_s": np.round(times.ends, 6),
    }
    return pd.DataFrame(columns)


def _look(kind: str, what: str) -> tuple[str, str]:
    """An operation's name in the legend, and its colour."""
    if kind in (Kind.FETCH, Kind.EVICT):
        return _COPIES.get(what, _MOMENTS)
    return _KERNELS.get(kind, _REST)


def streaming_figure(rows: pd.DataFrame, title: str) -> Figure:
    """The picture of one step's ``timeline_rows``."""
    looks = [_look(kind, what) for kind, what in zip(rows["kind"], rows["what"].fillna(""), strict=True)]
    rows, span = rows.assign(colour=[colour for _, colour in looks]), float(rows["end_s"].max())
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    grid = figure.subplots(len(LANES) + 1, 1, height_ratios=[1] * len(LANES) + [2.2])
    for axes, lane in zip(grid, LANES, strict=False):
        own = rows[rows["lane"] == lane]
        _draw_shares(axes, own, span)
        busy = (own["end_s"] - own["start_s"]).sum() / span
        axes.set_ylabel(f"{_NAMES[lane]}\n{100 * busy:.0f} %", fontsize=8)
    for axes in grid[: len(LANES) - 1]:
        axes.set_xticklabels([])
    grid[len(LANES) - 1].set_xlabel("time since the step began, s", fontsize=8)
    _draw_close_up(grid[-1], rows)
    grid[-1].set_xlabel("the middle of the step: time, ms; numbers are layers", fontsize=8)
    known = dict(looks)
    order = dict.fromkeys(name for name, _ in (*_KERNELS.values(), *_COPIES.values(), _MOMENTS))
    handles = [Patch(color=known[name], label=name) for name in order if name in known]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_shares(axes: Axes, own: pd.DataFrame, span: float) -> None:
    """The busy share of each part of the step, stacked by colour."""
    edges = np.linspace(0, span, _BINS + 1)
    bottom = np.zeros(_BINS)
    for colour, operations in own.groupby("colour", sort=False):
        lengths = operations["end_s"] - operations["start_s"]
        turns = np.ravel(operations[["start_s", "end_s"]])  # a lane does one thing at a time
        busy = np.repeat(np.append(0, lengths.cumsum()), 2)[1:-1]
        shares = np.diff(np.interp(edges, turns, busy)) / (span / _BINS)
        axes.bar(edges[:-1], shares, span / _BINS, bottom=bottom, align="edge", color=str(colour), lw=0)
        bottom += shares
    axes.set_xlim(0, span)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    _dress(axes)


def _draw_close_up(axes: Axes, rows: pd.DataFrame) -> None:
    kernels = rows[rows["lane"] == "compute"]
    middle = max(0, len(kernels) // 2 - _CLOSE_UP // 2)
    window = kernels.iloc[middle : middle + _CLOSE_UP]
    start, end = window["start_s"].iloc[0], window["end_s"].iloc[-1]
    for operation in rows[(rows["end_s"] > start) & (rows["start_s"] < end)].to_dict("records"):
        row, left = LANES.index(operation["lane"]), 1e3 * (operation["start_s"] - start)
        length = 1e3 * (operation["end_s"] - operation["start_s"])
        colour = operation["colour"]
        axes.broken_barh([(left, length)], (row - 0.42, 0.84), facecolors=colour, edgecolor="white", lw=0.4)
        if operation["kind"] in (Kind.FORWARD, Kind.BACKWARD) and length > 10 * (end - start):
            where, ink = (left + length / 2, row), "w" if colour == _BLUE else "k"
            axes.text(*where, str(operation["layer"]), ha="center", va="center", fontsize=6, color=ink)
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_yticks(range(len(LANES)), [_NAMES[lane] for lane in LANES], fontsize=8)
    _dress(axes)


def _dress(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7)
