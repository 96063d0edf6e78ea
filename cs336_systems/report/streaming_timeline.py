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
    Kind.RECOMPUTE: ("computed again", _ORANGE),
    Kind.KEYS: ("computed again", _ORANGE),
    Kind.RESTORE: ("computed again", _ORANGE),
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
    """What the legend calls an operation, and its colour."""
    if kind in (Kind.FETCH, Kind.EVICT):
        return _COPIES.get(what, _MOMENTS)
    return _KERNELS.get(kind, _REST)


def streaming_figure(rows: pd.DataFrame, title: str) -> Figure:
    """Of one step's ``timeline_rows``."""
    looks = [_look(kind, what) for kind, what in zip(rows["kind"], rows["what"].fillna(""), strict=True)]
    lanes, starts, ends = (list(rows[name]) for name in ("lane", "start_s", "end_s"))
    times = LaneTimes(lanes, starts, ends, {})
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    grid = figure.subplots(len(LANES) + 1, 1, height_ratios=[1] * len(LANES) + [2.2])
    for axes, lane in zip(grid, LANES, strict=False):
        own = [i for i, other in enumerate(times.lanes) if other == lane]
        _draw_shares(axes, own, times, looks)
        axes.set_ylabel(f"{_NAMES[lane]}\n{100 * times.busy[lane] / times.span:.0f} %", fontsize=8)
    for axes in grid[: len(LANES) - 1]:
        axes.set_xticklabels([])
    grid[len(LANES) - 1].set_xlabel("time since the step began, s", fontsize=8)
    _draw_close_up(grid[-1], rows, times, looks)
    grid[-1].set_xlabel("the middle of the step: time, ms; numbers are layers", fontsize=8)
    known = dict(looks)
    order = dict.fromkeys(name for name, _ in (*_KERNELS.values(), *_COPIES.values(), _MOMENTS))
    handles = [Patch(color=known[name], label=name) for name in order if name in known]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_shares(axes: Axes, own: list[int], times: LaneTimes, looks: list[tuple[str, str]]) -> None:
    """The busy share of each part of the step, stacked by colour."""
    width = times.span / _BINS
    shares: dict[tuple[str, str], np.ndarray] = {}
    for i in own:
        bins = shares.setdefault(looks[i], np.zeros(_BINS))
        first, last = int(times.starts[i] / width), min(_BINS - 1, int(times.ends[i] / width))
        for j in range(first, last + 1):
            bins[j] += max(0.0, min(times.ends[i], (j + 1) * width) - max(times.starts[i], j * width)) / width
    edges = np.arange(_BINS) * width
    bottom = np.zeros(_BINS)
    for (_, colour), bins in shares.items():
        axes.bar(edges, bins, width, bottom=bottom, align="edge", color=colour, lw=0)
        bottom += bins
    axes.set_xlim(0, times.span)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    _dress(axes)


def _draw_close_up(axes: Axes, rows: pd.DataFrame, times: LaneTimes, looks: list[tuple[str, str]]) -> None:
    kernels = [i for i, lane in enumerate(times.lanes) if lane == "compute"]
    middle = max(0, len(kernels) // 2 - _CLOSE_UP // 2)
    window = kernels[middle : middle + _CLOSE_UP]
    start, end = times.starts[window[0]], times.ends[window[-1]]
    for i, (kind, layer) in enumerate(zip(rows["kind"], rows["layer"], strict=True)):
        if times.ends[i] <= start or times.starts[i] >= end:
            continue
        row, left = LANES.index(times.lanes[i]), 1e3 * (times.starts[i] - start)
        length = 1e3 * (times.ends[i] - times.starts[i])
        axes.broken_barh([(left, length)], (row - 0.42, 0.84), facecolors=looks[i][1], edgecolor="white", lw=0.4)
        if kind in (Kind.FORWARD, Kind.BACKWARD) and length > 10 * (end - start):
            dark = looks[i][1] == _BLUE
            where = left + length / 2, row
            axes.text(*where, str(layer), ha="center", va="center", fontsize=6, color="w" if dark else "k")
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_yticks(range(len(LANES)), [_NAMES[lane] for lane in LANES], fontsize=8)
    _dress(axes)


def _dress(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7)
