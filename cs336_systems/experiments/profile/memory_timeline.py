"""The active memory timeline as PNG: bytes alive after each event of the allocator, stacked by category.

The x axis counts allocations and frees, as PyTorch's viewer does: the host makes them ahead of the device, so that on a
clock a phase is a burst and a wait. Phases are named above with their time under watch; the peak is marked, and the
legend, in the order of the stack, says what each category holds there. Okabe-Ito colours.
Drawn without pyplot, so importing this touches no display.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from cs336_systems.profiling.memory_history import CATEGORIES, OTHER, MemoryHistory, Moment

COLOURS = dict(zip(CATEGORIES, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#999999"), strict=True))

_UNITS = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024}
_NARROW = 0.06
"""A phase that takes less of the width has its name written upright."""
_LEAST_SHARE = 1e-3
"""Categories that never hold this share of the peak are left out: they are thinner than a line."""


def draw_memory_timeline(history: MemoryHistory, path: Path, title: str) -> None:
    """Draw every event of ``history``.

    Raises:
        OSError: the file cannot be written.
    """
    live = history.live_bytes()
    order = (OTHER, *(category for category in CATEGORIES if category != OTHER))
    peak = history.peak()
    drawn = [category for category in order if live[category].max() >= _LEAST_SHARE * max(1, peak.n_bytes)]
    unit, scale = unit_of(peak)
    figure, axes = figure_of(history)
    edges = np.arange(history.n_events + 2)
    bottom = np.zeros(history.n_events + 1)
    for category in drawn:
        top = bottom + live[category] / scale
        axes.stairs(top, edges, baseline=bottom, fill=True, color=COLOURS[category], linewidth=0.5)
        bottom = top
    figure.legend(
        handles=[Patch(color=COLOURS[category], label=_label(category, peak, scale, unit)) for category in drawn[::-1]],
        title="at the peak",
        alignment="left",
        loc="outside right center",
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def unit_of(peak: Moment) -> tuple[str, int]:
    """The unit in which a peak is shown, and its bytes."""
    return next((found for found in _UNITS.items() if peak.n_bytes >= found[1] / 10), ("KiB", 1024))


def figure_of(history: MemoryHistory) -> tuple[Figure, Axes]:
    """Axes over every event, with the phases named and the peak marked."""
    peak = history.peak()
    unit, scale = unit_of(peak)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, history.n_events + 1)
    axes.set_ylim(0, 1.16 * peak.n_bytes / scale)
    axes.set_xlabel("allocator events (allocations and frees), in order")
    axes.set_ylabel(f"memory alive (bytes asked for), {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    _mark_phases(axes, history)
    _mark_peak(axes, history, peak, scale, unit)
    return figure, axes


def _label(category: str, peak: Moment, scale: int, unit: str) -> str:
    n_bytes = peak.by_category[category]
    return f"{category}\n{n_bytes / scale:.2f} {unit} ({100 * n_bytes / max(1, peak.n_bytes):.0f} %)"


def _mark_phases(axes: Axes, history: MemoryHistory) -> None:
    """A line where each phase begins, and its name and time over its middle."""
    above = blended_transform_factory(axes.transData, axes.transAxes)
    for phase in history.phases:
        axes.axvline(phase.start, color="black", linewidth=0.8, linestyle=":")
        narrow = phase.end - phase.start < _NARROW * history.n_events
        axes.text(
            (phase.start + phase.end) / 2,
            0.985,
            f"{phase.name}\n{phase.ms:,.0f} ms",
            transform=above,
            horizontalalignment="center",
            verticalalignment="top",
            rotation=90 if narrow else 0,
            fontsize=9,
        )


def _mark_peak(axes: Axes, history: MemoryHistory, peak: Moment, scale: int, unit: str) -> None:
    """A point at the peak, its figure beside it on the side with more room."""
    height = peak.n_bytes / scale
    left = peak.event > history.n_events / 2
    axes.plot(peak.event + 0.5, height, marker="v", color="black", markersize=6, clip_on=False)
    axes.annotate(
        f"peak {height:.2f} {unit}",
        (peak.event + 0.5, height),
        (-8 if left else 8, 4),
        "data",
        "offset points",
        horizontalalignment="right" if left else "left",
        fontsize=9,
        fontweight="bold",
    )
