"""A step under memory caps as a picture: what each lane does, over the whole step and close up, as PNG.

    rows = timeline_rows(schedule.operations, times)         # a table, as files of benchmark_streaming.py hold it
    save(streaming_figure(rows, title), path)

Three lanes: copies in, kernels, copies out; times are simulated (``costs/streaming.py``) or measured. Above is the
whole step, with the share of it in which each lane is busy; below, some operations in the middle of the step, kernels
with their layers. White is waiting.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.costs.streaming import LANES, LaneTimes
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.timeline import draw_bars, name_rows
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
    rows = rows.assign(colour=[colour for _, colour in looks], length_s=rows["end_s"] - rows["start_s"])
    kernels, span = rows[rows["lane"] == "compute"], float(rows["end_s"].max())
    middle = max(0, len(kernels) // 2 - _CLOSE_UP // 2)
    close_up = kernels.iloc[middle : middle + _CLOSE_UP]
    figure = Figure(figsize=(12, 5), layout="constrained")
    whole, part = figure.subplots(2, 1)
    _draw_lanes(whole, rows, (0.0, span))
    busy = rows.groupby("lane")["length_s"].sum().reindex(LANES, fill_value=0.0) / span
    name_rows(whole, [(f"{_NAMES[lane]}\n{100 * busy[lane]:.0f} %", i) for i, lane in enumerate(LANES)])
    whole.set_xlabel("time since the step began, ms", fontsize=8)
    _draw_lanes(part, rows, (close_up["start_s"].iloc[0], close_up["end_s"].iloc[-1]), kernels_named=True)
    name_rows(part, [(_NAMES[lane], i) for i, lane in enumerate(LANES)])
    part.set_xlabel("the middle of the step; numbers are layers", fontsize=8)
    known = dict(looks)
    order = dict.fromkeys(name for name, _ in (*_KERNELS.values(), *_COPIES.values(), _MOMENTS))
    handles = [Patch(color=known[name], label=name) for name in order if name in known]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_lanes(axes: Axes, rows: pd.DataFrame, between: tuple[float, float], *, kernels_named: bool = False) -> None:
    """A row for each lane, from one time to another."""
    start, end = between
    axes.set_xlim(1e3 * start, 1e3 * end)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    for (lane, colour), own in rows[(rows["end_s"] > start) & (rows["start_s"] < end)].groupby(["lane", "colour"]):
        bars = list(zip(1e3 * own["start_s"], 1e3 * own["length_s"], strict=True))
        names = own["layer"].astype(str) if kernels_named and colour in (_SKY, _BLUE) else ()
        edges: dict[str, Any] = {"edgecolor": "white", "lw": 0.4} if kernels_named else {}
        draw_bars(axes, bars, (LANES.index(lane) - 0.42, 0.84), colour, list(names), **edges)
