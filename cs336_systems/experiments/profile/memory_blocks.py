"""Every allocation as a shape of its own over the allocator's events, as PNG: the view of pytorch.org/memory_viz.

An allocation is stacked on those that are alive when it is made, and falls when one below it is freed, so that its
lifetime is its length and what outlives what can be followed. The largest are drawn one by one, neighbours in two
shades of their category's colour, those too thin to be told apart in one; the others are one band on top, as in the
viewer. What existed before the log lies below, what lives longest lowest. Axes, phases and colours are those of the
view by category (``memory_timeline.py``): an event is an allocation or a free, where the viewer gives three more steps
to each fall, which it draws as a slope.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from cs336_systems.experiments.profile.memory_timeline import COLOURS, figure_of, unit_of
from cs336_systems.profiling.memory_history import CATEGORIES, Allocation, MemoryHistory

_LARGEST = 8000
_INCHES, _DPI = (10, 6.4), 200
"""Dots for each inch: a matrix of 100 MiB is two dots high where 50 GiB are alive."""
_LEAST_STRIPE = 1.5e-3
"""Of the peak, for neighbours in one shade."""
_REST_COLOUR = "#E5E5E5"
_LIGHTER = 0.35
"""Of the way to white, for every other stripe of a category."""


def draw_allocations(history: MemoryHistory, path: Path, title: str, largest: int = _LARGEST) -> None:
    """Draw the ``largest`` allocations of ``history`` one by one.

    Raises:
        OSError: the file cannot be written.
    """
    by_size = sorted(history.allocations, key=lambda allocation: -allocation.n_bytes)
    shown = sorted(by_size[:largest], key=lambda each: (each.start, CATEGORIES.index(each.category), -each.end))
    peak = history.peak()
    _, scale = unit_of(peak)
    figure, axes = figure_of(history)
    figure.set_size_inches(_INCHES)
    stripes: dict[str, tuple[int, int]] = {}
    colours = []
    for allocation in shown:
        n_stripes, n_bytes = stripes.get(allocation.category, (0, 0))
        colours.append(_shade(allocation.category, n_stripes % 2))
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
        entries.append(Patch(color=_REST_COLOUR, label=f"{len(rest):,} below {_size(by_size[largest - 1])}"))
    figure.legend(handles=entries[::-1], loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def places(allocations: Sequence[Allocation]) -> list[list[tuple[int, int]]]:
    """Of each allocation, in the order in which they are made: (event, bytes below it from then on)."""
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


def _shade(category: str, lighter: int) -> tuple[float, ...]:
    return tuple(part + lighter * _LIGHTER * (1 - part) for part in to_rgb(COLOURS[category]))


def _size(allocation: Allocation) -> str:
    return f"{allocation.n_bytes / 2**20:.3g} MiB"
