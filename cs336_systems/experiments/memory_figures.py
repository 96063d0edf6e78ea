"""Two pictures of an allocator's log: memory alive by category, and each allocation as a shape of its own.

The x axis counts allocations and frees, as PyTorch's viewer does: the host makes them ahead of the device, so that on a
clock a phase is a burst and a wait. Phases are named above with their time under watch, and the peak is marked.
Drawn without pyplot, so importing this touches no display.

In the second picture, the view of pytorch.org/memory_viz, an allocation is stacked on those that are alive when it is
made, and falls when one below it is freed, so that its lifetime is its length and what outlives what can be followed.
The largest are drawn one by one, neighbours in two shades of their category's colour, or in one where they are too thin
to be told apart; the others are one band on top. What existed before the log lies below, what lives longest lowest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.profiling.memory_history import CATEGORIES, OTHER, Allocation, MemoryHistory, Moment

COLOURS = dict(zip(CATEGORIES, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#999999"), strict=True))
_REST_COLOUR = "#E5E5E5"
_UNITS = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024}
_NARROW = 0.06
"""Share of the width below which a phase has its name written upright."""
_LEAST_SHARE = 1e-3
"""Categories that never hold this share of the peak are left out: they are thinner than a line."""
_LARGEST = 8000
"""Allocations that are drawn one by one."""
_LEAST_STRIPE = 1.5e-3
"""Share of the peak that neighbours in one shade have at least."""
_LIGHTER = 0.35
"""How far every other stripe of a category is on the way to white."""


def draw_history(history: MemoryHistory, out: Path, name: str, title: str) -> list[Path]:
    """Draw both pictures to ``out``; a matrix of 100 MiB is two dots high where 50 GiB are alive.

    Raises:
        OSError: a picture cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.png", out / f"{name}-active.png"]
    for path, figure, dpi in zip(
        paths, (timeline_figure(history), allocations_figure(history)), (150, 200), strict=True
    ):
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=dpi)
    return paths


def timeline_figure(history: MemoryHistory) -> Figure:
    """Bytes alive after every event, stacked by category; the legend tells them at the peak."""
    live, peak = history.live_bytes(), history.peak()
    order = (OTHER, *(category for category in CATEGORIES if category != OTHER))
    drawn = [category for category in order if live[category].max() >= _LEAST_SHARE * max(1, peak.n_bytes)]
    unit, scale = unit_of(peak)
    figure, axes = _figure_of(history, 4.6)
    edges = np.arange(history.n_events + 2)
    bottom, handles = np.zeros(history.n_events + 1), list[Patch]()
    for category in drawn:
        top, n_bytes = bottom + live[category] / scale, peak.by_category[category]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=COLOURS[category], linewidth=0.5)
        share = f"{n_bytes / scale:.2f} {unit} ({100 * n_bytes / max(1, peak.n_bytes):.0f} %)"
        handles.insert(0, Patch(color=COLOURS[category], label=f"{category}\n{share}"))
        bottom = top
    said: dict[str, Any] = {"title": "at the peak", "alignment": "left", "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="outside right center", **said)
    return figure


def unit_of(peak: Moment) -> tuple[str, int]:
    """The unit in which a peak is shown, and its bytes."""
    return next((found for found in _UNITS.items() if peak.n_bytes >= found[1] / 10), ("KiB", 1024))


def _figure_of(history: MemoryHistory, height: float) -> tuple[Figure, Axes]:
    """Axes over every event, with each phase named over its middle and the peak marked, on the side with more room."""
    peak = history.peak()
    unit, scale = unit_of(peak)
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, history.n_events + 1)
    axes.set_ylim(0, 1.16 * peak.n_bytes / scale)
    axes.set_xlabel("allocator events (allocations and frees), in order")
    axes.set_ylabel(f"memory alive (bytes asked for), {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    for phase in history.phases:
        axes.axvline(phase.start, color="black", linewidth=0.8, linestyle=":")
        upright = 90 if phase.end - phase.start < _NARROW * history.n_events else 0
        place, label = ((phase.start + phase.end) / 2, 0.985), f"{phase.name}\n{phase.ms:,.0f} ms"
        above = axes.get_xaxis_transform()
        axes.text(*place, label, transform=above, ha="center", va="top", rotation=upright, fontsize=9)
    at, left = (peak.event + 0.5, peak.n_bytes / scale), peak.event > history.n_events / 2
    axes.plot(*at, marker="v", color="black", markersize=6, clip_on=False)
    bold: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "ha": "right" if left else "left"}
    axes.annotate(f"peak {at[1]:.2f} {unit}", at, (-8 if left else 8, 4), "data", "offset points", **bold)
    return figure, axes


def allocations_figure(history: MemoryHistory, largest: int = _LARGEST) -> Figure:
    """The ``largest`` allocations of ``history`` one by one."""
    by_size = sorted(history.allocations, key=lambda allocation: -allocation.n_bytes)
    shown = sorted(by_size[:largest], key=lambda each: (each.start, CATEGORIES.index(each.category), -each.end))
    peak = history.peak()
    _, scale = unit_of(peak)
    figure, axes = _figure_of(history, 6.4)
    stripes: dict[str, tuple[int, int]] = {}
    colours = []
    for allocation in shown:
        n_stripes, n_bytes = stripes.get(allocation.category, (0, 0))
        lighter = n_stripes % 2 * _LIGHTER
        colours.append(tuple(part + lighter * (1 - part) for part in to_rgb(COLOURS[allocation.category])))
        n_bytes += allocation.n_bytes
        is_full = n_bytes >= _LEAST_STRIPE * peak.n_bytes
        stripes[allocation.category] = (n_stripes + 1, 0) if is_full else (n_stripes, n_bytes)
    outlines = [_outline(allocation, falls, scale) for allocation, falls in zip(shown, places(shown), strict=True)]
    # Edges or smoothed seams would outweigh shapes that are thinner than a pixel.
    axes.add_collection(PolyCollection(outlines, facecolors=colours, linewidths=0, antialiaseds=False))
    entries = [Patch(color=COLOURS[category], label=category) for category in CATEGORIES if category in stripes]
    if rest := by_size[largest:]:
        whole = np.sum(list(history.live_bytes().values()), axis=0)
        alone = MemoryHistory(rest, history.phases, history.n_events).live_bytes()
        drawn = whole - np.sum(list(alone.values()), axis=0)
        edges = np.arange(history.n_events + 2)
        axes.stairs(whole / scale, edges, baseline=drawn / scale, fill=True, color=_REST_COLOUR)
        below = f"{len(rest):,} below {by_size[largest - 1].n_bytes / 2**20:.3g} MiB"
        entries.append(Patch(color=_REST_COLOUR, label=below))
    figure.legend(handles=entries[::-1], loc="outside right center", frameon=False, fontsize=9)
    return figure


def places(allocations: Sequence[Allocation]) -> list[list[tuple[int, int]]]:
    """For each allocation, in the order in which they are made: (event, bytes below it from then on)."""
    found: list[list[tuple[int, int]]] = [[] for _ in allocations]
    alive: list[int] = []
    height = 0
    ends = [(allocation.end, False, i) for i, allocation in reversed(list(enumerate(allocations)))]
    starts = [(allocation.start, True, i) for i, allocation in enumerate(allocations)]
    changes = sorted([*ends, *starts], key=lambda change: change[:2])  # of equal ones, what lies on top is freed first
    for event, is_made, i in changes:
        n_bytes = allocations[i].n_bytes
        if is_made:
            found[i].append((event, height))
            alive.append(i)
            height += n_bytes
            continue
        position = alive.index(i)
        del alive[position]
        height -= n_bytes
        for above in alive[position:]:
            found[above].append((event, found[above][-1][1] - n_bytes))
    return found


def _outline(allocation: Allocation, falls: list[tuple[int, int]], scale: int) -> np.ndarray:
    """The corners of a shape, (2 x 2 x steps, 2): its upper edge from left to right, its lower one back."""
    events, below = np.array(falls).T
    x = np.repeat(np.append(events, allocation.end), 2)[1:-1]
    bottom = np.repeat(below, 2)
    y = np.concatenate([bottom + allocation.n_bytes, bottom[::-1]]) / scale
    return np.stack([np.concatenate([x, x[::-1]]), y], axis=1)
