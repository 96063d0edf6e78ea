"""Timelines of recorded steps, as PNG: a whole step, and a close-up of the backward of two of its blocks.

    draw_timeline(trace, PHASES, title, path)
    draw_two_blocks(trace, title, path)

The upper part has the host's ranges by thread and depth, the lower part the device's operations by stream. Ranges show
when the host issued work, operations when the device did it: the offset between them is the device's lag. Operations
are coloured by class, in the Okabe-Ito colours, brown and grey. Collectives that are wide enough are labelled. The
phases are drawn again above the streams, where their operations ran.

The close-up shows two blocks in the middle of the model, as an example: from the first operation of one to the last of
the other, and on to the end of the collectives that two blocks cause, which is two blocks' share of the step's. If
backward sends nothing, it shows the last two blocks and the collectives that follow backward.

A step under memory caps has three lanes, or five in a ring, simulated (``costs/lanes.py``) or measured:

    rows = timeline_rows(schedule.operations, times)         # a table, as files of benchmark_streaming.py hold it
    save(streaming_figure(rows, title), path)

Drawn without pyplot, so importing this touches no display.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.costs.lanes import LANES, LaneTimes
from cs336_systems.profiling.ranges import BACKWARD, STEP
from cs336_systems.profiling.traces.kernels import CLASSES, COMMUNICATION, collective_name, kernel_class
from cs336_systems.profiling.traces.queries import MS
from cs336_systems.profiling.traces.tables import Trace, TraceError
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.streaming.schedule import Kind, Operation

_OF_CLASSES = ("#0072B2", "#56B4E9", "#D55E00", "#F0E442", "#E69F00", "#8B4513", "#CC79A7", "#009E73", "#000000")
CLASS_COLOURS = dict(zip(CLASSES, (*_OF_CLASSES, "#999999"), strict=True))
_RANGE_GREYS = ("#D9D9D9", "#F0F0F0")
_MOST_DEPTHS = 5
_CHARACTERS_ACROSS = 210
"""Characters of a label that fit across the axes."""
_BLOCK = re.compile(rf"(?:^|\.)layers\.\d+{re.escape(BACKWARD)}$")

_LANE_NAMES = {"in": "to the device", "compute": "kernels", "out": "to the host", "send": "sent", "receive": "received"}
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
_MESSAGE = "messages", "#999999"
_MOMENTS = "moments", _PINK
_REST = "head and loss", "#999999"
_CLOSE_UP = 40
"""Number of kernels in the close-up."""


def draw_timeline(
    trace: Trace, phases: Sequence[str], title: str, path: Path, between: tuple[int, int] | None = None
) -> None:
    """Draw the last recorded step.

    Args:
        phases: the ranges that are drawn again where their operations ran, "forward" and so on.
        between: start and end of the part to draw, in the trace's ns; by default the whole step.

    Raises:
        TraceError: the trace holds no step.
        OSError: the file cannot be written.
    """
    window = trace.instances(STEP).iloc[[-1]]
    zero, caller = int(window["start"].iloc[0]), int(window["tid"].iloc[0])
    ops, ranges = trace.operations(window), trace.during(trace.ranges, window)
    start, end = between or (zero, max(int(window["end"].iloc[0]), int(ops["end"].max())))
    ran = trace.operations(ranges[ranges["name"].isin(phases)])
    own = ran[ran["name"].map(kernel_class) != COMMUNICATION].groupby("instance")
    passes = own.agg(start=("start", "min"), end=("end", "max"))
    passes["name"] = trace.ranges["name"][passes.index]
    ops, ranges, passes = (
        rows[(rows["end"] > start) & (rows["start"] < end)]
        for rows in (ops, ranges[ranges["depth"] < _MOST_DEPTHS], passes)
    )
    rows: list[tuple[str, pd.DataFrame]] = []
    for tid in sorted(ranges["tid"].unique(), key=lambda tid: tid != caller):
        thread = "caller's thread" if tid == caller else "autograd's thread"
        by_depth = ranges[ranges["tid"] == tid].groupby("depth")
        rows += [(f"depth {depth}" if depth else thread, group) for depth, group in by_depth]
    streams = [(_stream_name(trace, place), group) for place, group in ops.groupby(["device", "stream"])]

    heights = [max(1, len(rows)) * 0.33, 0.33 + 0.75 * max(1, len(streams))]
    figure = Figure(figsize=(12, 1.6 + sum(heights)), layout="constrained")
    host, device = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    device.set_xlim((start - zero) / MS, (end - zero) / MS)
    for i, (_, group) in enumerate(rows):
        _draw_ranges(host, group, zero, i - 0.45, 0.9)
    host.set_ylim(len(rows) - 0.5, -0.5)
    host.set_title("host: ranges by thread and depth", loc="left", fontsize=9)
    _draw_ranges(device, passes, zero, -0.93, 0.36)
    for i, (_, group) in enumerate(streams):
        for label, kernels in group.groupby(group["name"].map(kernel_class)):
            place, colour = (i - 0.4, 0.8), CLASS_COLOURS[str(label)]
            if label == COMMUNICATION:
                names = list(kernels["name"].map(collective_name))
                draw_bars(device, _in_ms(kernels, zero), place, colour, names, "w", edgecolor="w", lw=0.3)
            else:
                draw_bars(device, _in_ms(kernels, zero), place, colour)
    device.set_ylim(len(streams) - 0.5, -1.0)
    what = "device: kernels, copies and fills by stream" if trace.has_gpu else "CPU: operators by thread"
    device.set_title(f"{what}; above them the phases from their first operation to their last", loc="left", fontsize=9)
    name_rows(host, [(label, i) for i, (label, _) in enumerate(rows)])
    name_rows(device, [("phases", -0.75), *((name, i) for i, (name, _) in enumerate(streams))])
    device.set_xlabel("time since the step began, ms", fontsize=9)
    present = set(ops["name"].map(kernel_class))
    handles = [Patch(color=CLASS_COLOURS[label], label=label) for label in CLASSES if label in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(CLASSES), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=160)


def draw_two_blocks(trace: Trace, title: str, path: Path) -> None:
    """Draw the part of a step that ``two_blocks`` finds.

    Raises:
        TraceError: as ``two_blocks``.
        OSError: the file cannot be written.
    """
    blocks = [name for name in trace.ranges["name"].unique() if _BLOCK.search(name)]
    draw_timeline(trace, blocks, title, path, two_blocks(trace))


def two_blocks(trace: Trace) -> tuple[int, int]:
    """Return start and end, in the trace's ns, of two blocks' backward on the device in the last recorded step.

    It includes the collectives that are two blocks' share of the step's.

    Raises:
        TraceError: the trace holds no step, no backward of two blocks, or no collectives.
    """
    window = trace.instances(STEP).iloc[[-1]]
    ranges = trace.during(trace.ranges, window)
    blocks = ranges[ranges["name"].map(lambda name: _BLOCK.search(name) is not None)]
    if len(blocks) < 2:
        raise TraceError(f"{trace.source}: no backward of two blocks is ranged")
    ops = trace.operations(window)
    sends = ops[(ops["name"].map(kernel_class) == COMMUNICATION) & (ops["launch_start"] >= blocks["start"].min())]
    if sends.empty:
        raise TraceError(f"{trace.source}: backward sends nothing")
    during = (sends["launch_start"] < blocks["end"].max()).any()
    first = len(blocks) // 2 - 1 if during else len(blocks) - 2
    pair = blocks.iloc[first : first + 2]
    later = sends[sends["launch_start"] >= pair["start"].min()].sort_values("launch_start", kind="stable")
    own = later.head(math.ceil(2 * len(sends) / len(blocks)))
    computed = trace.operations(pair)
    computed = computed[computed["name"].map(kernel_class) != COMMUNICATION]
    return int(computed["start"].min()), int(max(computed["end"].max(), own["end"].max()))


def draw_bars(
    axes: Axes,
    bars: Sequence[tuple[float, float]],
    place: tuple[float, float],
    colours: Any,
    names: Sequence[str] = (),
    ink: str = "k",
    **edges: Any,
) -> None:
    """Draw one row of bars (start, length) at ``place``, (bottom, height), with centred names where they fit.

    Bars have edges only if ``edges`` are given: without them a thousand bars stay readable.
    """
    axes.broken_barh(list(bars), place, facecolors=colours, **{"lw": 0, **edges})
    left, right = axes.get_xlim()
    per_character = (right - left) / _CHARACTERS_ACROSS
    for name, (start, length) in zip(names, bars, strict=False):
        begin, end = max(start, left), min(start + length, right)
        if len(name) * per_character < end - begin:
            middle = ((begin + end) / 2, place[0] + place[1] / 2)
            axes.text(*middle, name, ha="center", va="center", fontsize=6.5, color=ink, clip_on=True)


def name_rows(axes: Axes, rows: Sequence[tuple[str, float]]) -> None:
    """Label the rows at their heights, and remove the frame."""
    axes.set_yticks([place for _, place in rows], [name for name, _ in rows], fontsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)


def _draw_ranges(axes: Axes, ranges: pd.DataFrame, zero: int, bottom: float, height: float) -> None:
    """Draw one row of ranges in alternating greys, with their names."""
    greys = [_RANGE_GREYS[i % 2] for i in range(len(ranges))]
    names = list(ranges["name"].str.removesuffix(BACKWARD))
    draw_bars(axes, _in_ms(ranges, zero), (bottom, height), greys, names, edgecolor="#7F7F7F", lw=0.3)


def _in_ms(rows: pd.DataFrame, zero: int) -> list[tuple[float, float]]:
    """Return each row's start after ``zero`` and its length, in ms."""
    return list(zip((rows["start"] - zero) / MS, (rows["end"] - rows["start"]) / MS, strict=True))


def _stream_name(trace: Trace, place: Any) -> str:
    """Return the name of a (device, stream)."""
    return f"GPU {place[0]}, stream {place[1]}" if trace.has_gpu else "CPU operators"


def timeline_rows(operations: Sequence[Operation], times: LaneTimes) -> pd.DataFrame:
    """Return a row for each operation of a step: its ``lane``, ``kind``, ``what`` a copy carries, ``layer``,
    ``start_s`` and ``end_s`` since the step began.
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
    """Return an operation's name in the legend, and its colour."""
    if kind in (Kind.FETCH, Kind.EVICT):
        return _COPIES.get(what, _MOMENTS)
    if kind in (Kind.SEND, Kind.RECEIVE):
        return _MESSAGE
    return _KERNELS.get(kind, _REST)


def streaming_figure(rows: pd.DataFrame, title: str) -> Figure:
    """Draw the lanes of one streamed step's ``timeline_rows``: the whole step, and a close-up.

    The lanes are copies in, kernels and copies out, and in a ring two for messages. The upper panel is the whole step,
    with the share of time that each lane is busy; the lower one shows operations in the middle of the step, with the
    layers of forward and backward kernels. White is waiting.
    """
    looks = [_look(kind, what) for kind, what in zip(rows["kind"], rows["what"].fillna(""), strict=True)]
    rows = rows.assign(colour=[colour for _, colour in looks], length_s=rows["end_s"] - rows["start_s"])
    kernels, span = rows[rows["lane"] == "compute"], float(rows["end_s"].max())
    middle = max(0, len(kernels) // 2 - _CLOSE_UP // 2)
    close_up = kernels.iloc[middle : middle + _CLOSE_UP]
    figure = Figure(figsize=(12, 5), layout="constrained")
    whole, part = figure.subplots(2, 1)
    _draw_lanes(whole, rows, (0.0, span))
    lanes = _lanes(rows)
    busy = rows.groupby("lane")["length_s"].sum().reindex(lanes, fill_value=0.0) / span
    name_rows(whole, [(f"{_LANE_NAMES[lane]}\n{100 * busy[lane]:.0f} %", i) for i, lane in enumerate(lanes)])
    whole.set_xlabel("time since the step began, ms", fontsize=8)
    _draw_lanes(part, rows, (close_up["start_s"].iloc[0], close_up["end_s"].iloc[-1]), kernels_named=True)
    name_rows(part, [(_LANE_NAMES[lane], i) for i, lane in enumerate(lanes)])
    part.set_xlabel("the middle of the step; numbers are layers", fontsize=8)
    known = dict(looks)
    order = dict.fromkeys(name for name, _ in (*_KERNELS.values(), *_COPIES.values(), _MOMENTS, _MESSAGE))
    handles = [Patch(color=known[name], label=name) for name in order if name in known]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _lanes(rows: pd.DataFrame) -> list[str]:
    """Return the lanes of a step's figure, from top to bottom."""
    return [lane for i, lane in enumerate(LANES) if i < 3 or lane in set(rows["lane"])]


def _draw_lanes(axes: Axes, rows: pd.DataFrame, between: tuple[float, float], *, kernels_named: bool = False) -> None:
    """Draw a row for each lane between two times, in s."""
    (start, end), lanes = between, _lanes(rows)
    axes.set_xlim(1e3 * start, 1e3 * end)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    for (lane, colour), own in rows[(rows["end_s"] > start) & (rows["start_s"] < end)].groupby(["lane", "colour"]):
        bars = list(zip(1e3 * own["start_s"], 1e3 * own["length_s"], strict=True))
        names = own["layer"].astype(str) if kernels_named and colour in (_SKY, _BLUE) else ()
        edges: dict[str, Any] = {"edgecolor": "white", "lw": 0.4} if kernels_named else {}
        draw_bars(axes, bars, (lanes.index(str(lane)) - 0.42, 0.84), colour, list(names), **edges)
