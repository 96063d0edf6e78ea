"""One step on the time line, as PNG: the ranges above, by thread and depth; what the device did below, by stream.

The ranges are when the host issued work, the operations when the device did it: the slant between the two is how far
the device lags behind. Operations are coloured by class, in the Okabe-Ito colours, brown and grey; the phases are drawn
a second time over the streams, where their operations ran. Drawn without pyplot, so importing this touches no display.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.profiling.ranges import BACKWARD, STEP
from cs336_systems.profiling.traces.kernels import CLASSES, kernel_class
from cs336_systems.profiling.traces.queries import MS
from cs336_systems.profiling.traces.tables import Trace

CLASS_COLOURS = dict(
    zip(
        CLASSES,
        ("#0072B2", "#56B4E9", "#D55E00", "#F0E442", "#E69F00", "#8B4513", "#CC79A7", "#009E73", "#000000", "#999999"),
        strict=True,
    )
)
_RANGE_GREYS = ("#D9D9D9", "#F0F0F0")
_MOST_DEPTHS = 5
_WIDTH_INCHES = 12.0
_CHARACTERS_ACROSS = 210
"""Characters of the labels' size that fit between the axes."""


def draw_timeline(trace: Trace, phases: list[str], title: str, path: Path, step: int = -1) -> None:
    """Draw one recorded step, by default the last.

    Args:
        phases: the ranges that are drawn again where their operations ran, "forward" and so on.

    Raises:
        TraceError: the trace holds no step.
        IndexError: it holds fewer steps than asked for.
    """
    window = trace.instances(STEP).iloc[[step]]
    zero, caller = int(window["start"].iloc[0]), int(window["tid"].iloc[0])
    ops, ranges = (in_ms(rows, zero) for rows in (trace.operations(window), trace.during(trace.ranges, window)))
    ranges = ranges[ranges["depth"] < _MOST_DEPTHS]
    whole_ms = (max(int(window["end"].iloc[0]), int(ops["end"].max())) - zero) / MS
    ran = trace.operations(trace.during(trace.ranges[trace.ranges["name"].isin(phases)], window))
    named = ran.groupby(trace.ranges["name"][ran["instance"]].to_numpy(), sort=False)
    passes = in_ms(named.agg(start=("start", "min"), end=("end", "max")).reset_index(names="name"), zero)
    rows: list[tuple[str, pd.DataFrame]] = []
    for tid in sorted(ranges["tid"].unique(), key=lambda tid: tid != caller):
        thread = "caller's thread" if tid == caller else "autograd's thread"
        own = ranges[ranges["tid"] == tid]
        rows += [(f"depth {depth}" if depth else thread, group) for depth, group in own.groupby("depth")]
    streams = list(ops.groupby(["device", "stream"]))

    height = 1.6 + 0.33 * (len(rows) + 1) + 0.75 * len(streams)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    host, device = figure.subplots(
        2, 1, sharex=True, height_ratios=[max(1, len(rows)) * 0.33, 0.33 + 0.75 * max(1, len(streams))]
    )
    device.set_xlim(0, whole_ms)
    for i, (_, group) in enumerate(rows):
        draw_ranges(host, group, i - 0.45, 0.9)
    host.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    host.set_ylim(len(rows) - 0.5, -0.5)
    host.set_title("host: ranges by thread and depth", loc="left", fontsize=9)

    draw_ranges(device, passes, -0.93, 0.36)
    for i, (_, group) in enumerate(streams):
        draw_operations(device, group, i - 0.4, 0.8)
    names = [stream_name(trace, place) for place, _ in streams]
    device.set_yticks([-0.75, *range(len(names))], ["phases", *names], fontsize=7)
    device.set_ylim(len(names) - 0.5, -1.0)
    what = "device: kernels, copies and fills by stream" if trace.has_gpu else "CPU: operators by thread"
    device.set_title(f"{what}; the phases from their first operation to their last", loc="left", fontsize=9)
    device.set_xlabel("time since the step began, ms", fontsize=9)
    for axes in (host, device):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
    draw_legend(figure, ops)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=160)


def draw_operations(axes: Axes, ops: pd.DataFrame, bottom: float, height: float) -> None:
    """One row of operations (as ``in_ms`` returns them) in the colours of their classes."""
    for label, kernels in ops.groupby(ops["name"].map(kernel_class)):  # no edges: a thousand stay readable
        axes.broken_barh(_bars(kernels), (bottom, height), facecolors=CLASS_COLOURS[str(label)], lw=0)


def draw_legend(figure: Figure, ops: pd.DataFrame) -> None:
    """The colours of the classes that occur."""
    present = set(ops["name"].map(kernel_class))
    figure.legend(
        handles=[Patch(color=CLASS_COLOURS[label], label=label) for label in CLASSES if label in present],
        loc="outside lower center",
        ncols=len(CLASSES),
        frameon=False,
        fontsize=8,
    )


def stream_name(trace: Trace, place: Any) -> str:
    """What a row of operations ran on, for its (device, stream)."""
    return f"GPU {place[0]}, stream {place[1]}" if trace.has_gpu else "CPU operators"


def in_ms(rows: pd.DataFrame, zero: int) -> pd.DataFrame:
    """With ``start_ms`` after ``zero`` and ``length_ms``."""
    return rows.assign(start_ms=(rows["start"] - zero) / MS, length_ms=(rows["end"] - rows["start"]) / MS)


def _bars(rows: pd.DataFrame) -> list[tuple[float, float]]:
    return list(zip(rows["start_ms"], rows["length_ms"], strict=True))


def draw_ranges(axes: Axes, ranges: pd.DataFrame, bottom: float, height: float) -> None:
    """One row of ranges, neighbours in alternating greys, each with its name in its middle if it fits."""
    colours = [_RANGE_GREYS[i % 2] for i in range(len(ranges))]
    axes.broken_barh(_bars(ranges), (bottom, height), facecolors=colours, edgecolor="#7F7F7F", lw=0.3)
    left, right = axes.get_xlim()
    per_character = (right - left) / _CHARACTERS_ACROSS
    for name, (start, length) in zip(ranges["name"].str.removesuffix(BACKWARD), _bars(ranges), strict=True):
        if len(name) * per_character < length:
            middle = (start + length / 2, bottom + height / 2)
            axes.text(*middle, name, ha="center", va="center", fontsize=6.5, clip_on=True)
