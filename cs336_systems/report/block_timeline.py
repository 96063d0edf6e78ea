"""Backward of two blocks on the device's time line, as PNG, each collective named: a step of many ranks, close up.

    draw_two_blocks(trace, title, path)

Two blocks in the middle of the model stand for all: from the first operation of the one to the last of the other, and
on to the end of the collectives that two blocks cause, the step's share of two. Where backward sends nothing, it is the
last two blocks, and the collectives that follow backward. Times are those of the whole step's picture. Drawn without
pyplot, so importing this touches no display.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.profiling.ranges import BACKWARD, STEP
from cs336_systems.profiling.traces.kernels import COMMUNICATION, collective_name, kernel_class
from cs336_systems.profiling.traces.queries import MS
from cs336_systems.profiling.traces.tables import Trace, TraceError
from cs336_systems.report.timeline import draw_legend, draw_operations, draw_ranges, in_ms, stream_name

_BLOCK = re.compile(rf"(?:^|\.)(layers\.\d+){re.escape(BACKWARD)}$")
_MARGIN = 0.01
_WIDTH_INCHES = 12.0
_ROW_INCHES, _LABELS_INCHES = 0.6, 1.2
_LABELS_ACROSS = 95
"""Upright labels that fit between the axes."""


@dataclass(frozen=True)
class Window:
    """What is drawn: the blocks' backward ranges on the device, the collectives, and from when to when (ns)."""

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
    found = two_blocks(trace, step)
    zero = int(trace.instances(STEP)["start"].iloc[step])
    ops = trace.operations(trace.instances(STEP).iloc[[step]])
    ops = in_ms(ops[(ops["end"] > found.start) & (ops["start"] < found.end)], zero)
    streams = list(ops.groupby(["device", "stream"]))
    shown = in_ms(found.collectives, zero)
    below = [shown[shown.index.isin(group.index)] for _, group in streams]

    height = 1.6 + _ROW_INCHES * len(streams) + _LABELS_INCHES * sum(len(collectives) > 0 for collectives in below)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = figure.subplots()
    margin = _MARGIN * (found.end - found.start)
    axes.set_xlim((found.start - margin - zero) / MS, (found.end + margin - zero) / MS)
    draw_ranges(axes, in_ms(found.blocks, zero), -0.7, 0.5)
    ticks, bottom = {"backward of": -0.45}, 0.0
    for (place, group), collectives in zip(streams, below, strict=True):
        draw_operations(axes, group, bottom, 0.9)
        ticks[stream_name(trace, place)] = bottom + 0.45
        bottom += 1.0
        if len(collectives):
            _label(axes, collectives, bottom - 0.1)
            bottom += _LABELS_INCHES / _ROW_INCHES
    axes.set_ylim(bottom, -0.8)
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("time since the step began, ms", fontsize=9)
    draw_legend(figure, ops)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=160)


def _label(axes: Axes, collectives: pd.DataFrame, top: float) -> None:
    """An upright name and duration below each bar, moved aside where bars are closer than letters are wide."""
    left, right = axes.get_xlim()
    ordered = collectives.sort_values("start")
    middles = (ordered["start_ms"] + ordered["length_ms"] / 2).clip(left, right)
    places = spread(middles.to_numpy(), (right - left) / _LABELS_ACROSS, right)
    for name, length, middle, place in zip(ordered["name"], ordered["length_ms"], middles, places, strict=True):
        label = f"{collective_name(name)} {length:.2f} ms"
        axes.plot([middle, place], [top, top + 0.3], color="#7F7F7F", lw=0.5)
        axes.text(place, top + 0.35, label, rotation=90, ha="center", va="top", fontsize=6.5)


def spread(wanted: np.ndarray, least: float, most: float) -> np.ndarray:
    """Ordered places near those wanted, at least ``least`` apart and none above ``most``."""
    places, steps = wanted.astype(float), least * np.arange(len(wanted))
    places = np.maximum.accumulate(places - steps) + steps
    return np.minimum(places, most - steps[::-1])
