"""Recorded steps on a time line, as PNG: a step whole, and the backward of two of its blocks close up.

    draw_timeline(trace, ["forward", "backward", "optimizer"], title, path)
    draw_two_blocks(trace, title, path)

In a whole step the ranges are above, by thread and depth, and what the device did is below, by stream. The ranges are
when the host issued work, the operations when the device did it: the slant between the two is how far the device lags
behind. Operations are coloured by class, in the Okabe-Ito colours, brown and grey; the phases are drawn a second time
over the streams, where their operations ran.

Close up, two blocks in the middle of the model stand for all: from the first operation of the one to the last of the
other, and on to the end of the collectives that two blocks cause, the step's share of two, each with its name and time.
Where backward sends nothing, it is the last two blocks, and the collectives that follow backward.

Drawn without pyplot, so importing this touches no display.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.profiling.ranges import BACKWARD, STEP
from cs336_systems.profiling.traces.kernels import CLASSES, COMMUNICATION, collective_name, kernel_class
from cs336_systems.profiling.traces.queries import MS
from cs336_systems.profiling.traces.tables import Trace, TraceError

_OF_CLASSES = ("#0072B2", "#56B4E9", "#D55E00", "#F0E442", "#E69F00", "#8B4513", "#CC79A7", "#009E73", "#000000")
CLASS_COLOURS = dict(zip(CLASSES, (*_OF_CLASSES, "#999999"), strict=True))
_RANGE_GREYS = ("#D9D9D9", "#F0F0F0")
_MOST_DEPTHS = 5
_WIDTH_INCHES = 12.0
_CHARACTERS_ACROSS = 210
"""Characters of the labels' size that fit between the axes."""
_UPRIGHT_ACROSS = 95
"""Upright labels that fit between the axes."""
_BLOCK = re.compile(rf"(?:^|\.)(layers\.\d+){re.escape(BACKWARD)}$")


def draw_timeline(trace: Trace, phases: list[str], title: str, path: Path, step: int = -1) -> None:
    """Draw one recorded step, by default the last.

    Args:
        phases: the ranges that are drawn again where their operations ran, "forward" and so on.

    Raises:
        TraceError: the trace holds no step.
        IndexError: it holds fewer steps than asked for.
        OSError: the file cannot be written.
    """
    window = trace.instances(STEP).iloc[[step]]
    zero, caller = int(window["start"].iloc[0]), int(window["tid"].iloc[0])
    ops, ranges = (_in_ms(rows, zero) for rows in (trace.operations(window), trace.during(trace.ranges, window)))
    ranges = ranges[ranges["depth"] < _MOST_DEPTHS]
    ran = trace.operations(trace.during(trace.ranges[trace.ranges["name"].isin(phases)], window))
    named = ran.groupby(trace.ranges["name"][ran["instance"]].to_numpy(), sort=False)
    passes = _in_ms(named.agg(start=("start", "min"), end=("end", "max")).reset_index(names="name"), zero)
    rows: list[tuple[str, pd.DataFrame]] = []
    for tid in sorted(ranges["tid"].unique(), key=lambda tid: tid != caller):
        thread = "caller's thread" if tid == caller else "autograd's thread"
        own = ranges[ranges["tid"] == tid]
        rows += [(f"depth {depth}" if depth else thread, group) for depth, group in own.groupby("depth")]
    streams = [(_stream_name(trace, place), group) for place, group in ops.groupby(["device", "stream"])]

    heights = [max(1, len(rows)) * 0.33, 0.33 + 0.75 * max(1, len(streams))]
    figure = Figure(figsize=(_WIDTH_INCHES, 1.6 + sum(heights)), layout="constrained")
    host, device = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    device.set_xlim(0, (max(int(window["end"].iloc[0]), int(ops["end"].max())) - zero) / MS)
    for i, (_, group) in enumerate(rows):
        _draw_ranges(host, group, i - 0.45, 0.9)
    host.set_ylim(len(rows) - 0.5, -0.5)
    host.set_title("host: ranges by thread and depth", loc="left", fontsize=9)
    _draw_ranges(device, passes, -0.93, 0.36)
    for i, (_, group) in enumerate(streams):
        _draw_operations(device, group, i - 0.4, 0.8)
    device.set_ylim(len(streams) - 0.5, -1.0)
    what = "device: kernels, copies and fills by stream" if trace.has_gpu else "CPU: operators by thread"
    device.set_title(f"{what}; the phases from their first operation to their last", loc="left", fontsize=9)
    _dress(host, [(label, i) for i, (label, _) in enumerate(rows)])
    _dress(device, [("phases", -0.75), *((name, i) for i, (name, _) in enumerate(streams))])
    _finish(figure, ops, title, path)


@dataclass(frozen=True)
class Window:
    """The blocks' backward ranges on the device, the collectives, and from when to when (ns)."""

    blocks: pd.DataFrame
    collectives: pd.DataFrame
    start: int
    end: int


def two_blocks(trace: Trace, step: int = -1) -> Window:
    """The backward of two blocks of one recorded step, and the collectives that are two blocks' share of it.

    Raises:
        TraceError: the trace holds no step, no backward of blocks, or no collectives.
    """
    window = trace.instances(STEP).iloc[[step]]
    ranges = trace.during(trace.ranges, window)
    blocks = ranges[ranges["name"].map(lambda name: _BLOCK.search(name) is not None)]
    if len(blocks) < 2:
        raise TraceError(f"{trace.source}: no backward of two blocks is ranged")
    ops = trace.operations(window)
    sends = ops["name"].map(kernel_class) == COMMUNICATION
    later = ops[sends & (ops["launch_start"] >= blocks["start"].min())].sort_values("launch_start", kind="stable")
    if later.empty:
        raise TraceError(f"{trace.source}: backward sends nothing")
    during = later["launch_start"] < blocks["end"].max()
    first = len(blocks) // 2 - 1 if during.any() else len(blocks) - 2
    pair = blocks.iloc[first : first + 2]
    own = later[later["launch_start"] >= pair["start"].min()].head(math.ceil(2 * len(later) / len(blocks)))
    computed = trace.operations(blocks)
    computed = computed[computed["name"].map(kernel_class) != COMMUNICATION]
    ran = computed.groupby("instance").agg(start=("start", "min"), end=("end", "max"))
    ran["name"] = blocks["name"].str.extract(_BLOCK)[0]
    start, end = ran["start"][pair.index].min(), max(ran["end"][pair.index].max(), own["end"].max())
    return Window(ran[(ran["end"] > start) & (ran["start"] < end)], own, int(start), int(end))


def draw_two_blocks(trace: Trace, title: str, path: Path, step: int = -1) -> None:
    """Draw the window of ``two_blocks``, a row for each stream; each collective with its name and time.

    Raises:
        TraceError: as ``two_blocks``.
        OSError: the file cannot be written.
    """
    found, window = two_blocks(trace, step), trace.instances(STEP).iloc[[step]]
    zero, ops = int(window["start"].iloc[0]), trace.operations(window)
    ops = _in_ms(ops[(ops["end"] > found.start) & (ops["start"] < found.end)], zero)
    shown = _in_ms(found.collectives, zero)
    streams = [
        (_stream_name(trace, place), group, shown[shown.index.isin(group.index)])
        for place, group in ops.groupby(["device", "stream"])
    ]
    labelled = sum(len(collectives) > 0 for *_, collectives in streams)
    figure = Figure(figsize=(_WIDTH_INCHES, 1.6 + 0.6 * len(streams) + 1.2 * labelled), layout="constrained")
    axes = figure.subplots()
    margin = 0.01 * (found.end - found.start)
    axes.set_xlim((found.start - margin - zero) / MS, (found.end + margin - zero) / MS)
    _draw_ranges(axes, _in_ms(found.blocks, zero), -0.7, 0.5)
    ticks, bottom = [("backward of", -0.45)], 0.0
    for name, group, collectives in streams:
        _draw_operations(axes, group, bottom, 0.9)
        ticks.append((name, bottom + 0.45))
        bottom += 1.0
        if len(collectives):
            _label(axes, collectives, bottom - 0.1)
            bottom += 2.0
    axes.set_ylim(bottom, -0.8)
    _dress(axes, ticks)
    _finish(figure, ops, title, path)


def _label(axes: Axes, collectives: pd.DataFrame, top: float) -> None:
    """An upright name and duration below each bar, moved aside where bars are closer than letters are wide."""
    left, right = axes.get_xlim()
    ordered = collectives.sort_values("start")
    middles = (ordered["start_ms"] + ordered["length_ms"] / 2).clip(left, right)
    places = spread(middles.to_numpy(), (right - left) / _UPRIGHT_ACROSS, right)
    for name, length, middle, place in zip(ordered["name"], ordered["length_ms"], middles, places, strict=True):
        label = f"{collective_name(name)} {length:.2f} ms"
        axes.plot([middle, place], [top, top + 0.3], color="#7F7F7F", lw=0.5)
        axes.text(place, top + 0.35, label, rotation=90, ha="center", va="top", fontsize=6.5)


def spread(wanted: np.ndarray, least: float, most: float) -> np.ndarray:
    """Ordered places near those wanted, at least ``least`` apart and none above ``most``."""
    places, steps = wanted.astype(float), least * np.arange(len(wanted))
    places = np.maximum.accumulate(places - steps) + steps
    return np.minimum(places, most - steps[::-1])


def _draw_operations(axes: Axes, ops: pd.DataFrame, bottom: float, height: float) -> None:
    """One row of operations in the colours of their classes."""
    for label, kernels in ops.groupby(ops["name"].map(kernel_class)):  # no edges: a thousand stay readable
        axes.broken_barh(_bars(kernels), (bottom, height), facecolors=CLASS_COLOURS[str(label)], lw=0)


def _draw_ranges(axes: Axes, ranges: pd.DataFrame, bottom: float, height: float) -> None:
    """One row of ranges, neighbours in alternating greys, each with its name in its middle if it fits."""
    colours = [_RANGE_GREYS[i % 2] for i in range(len(ranges))]
    axes.broken_barh(_bars(ranges), (bottom, height), facecolors=colours, edgecolor="#7F7F7F", lw=0.3)
    left, right = axes.get_xlim()
    per_character = (right - left) / _CHARACTERS_ACROSS
    for name, (start, length) in zip(ranges["name"].str.removesuffix(BACKWARD), _bars(ranges), strict=True):
        if len(name) * per_character < length:
            middle = (start + length / 2, bottom + height / 2)
            axes.text(*middle, name, ha="center", va="center", fontsize=6.5, clip_on=True)


def _in_ms(rows: pd.DataFrame, zero: int) -> pd.DataFrame:
    """The rows with ``start_ms`` after ``zero`` and ``length_ms``."""
    return rows.assign(start_ms=(rows["start"] - zero) / MS, length_ms=(rows["end"] - rows["start"]) / MS)


def _bars(rows: pd.DataFrame) -> list[tuple[float, float]]:
    return list(zip(rows["start_ms"], rows["length_ms"], strict=True))


def _stream_name(trace: Trace, place: Any) -> str:
    """The name of what a row of operations ran on, by its (device, stream)."""
    return f"GPU {place[0]}, stream {place[1]}" if trace.has_gpu else "CPU operators"


def _dress(axes: Axes, rows: Sequence[tuple[str, float]]) -> None:
    """Name the rows, each at its height."""
    axes.set_yticks([place for _, place in rows], [name for name, _ in rows], fontsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)


def _finish(figure: Figure, ops: pd.DataFrame, title: str, path: Path) -> None:
    """Name the axis of time, the classes that occur and the whole, and write the file."""
    present = set(ops["name"].map(kernel_class))
    handles = [Patch(color=CLASS_COLOURS[label], label=label) for label in CLASSES if label in present]
    figure.axes[-1].set_xlabel("time since the step began, ms", fontsize=9)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(CLASSES), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=160)
