"""Figures of attention: time and memory against sequence length, and masks as FlexAttention runs them."""

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from cs336_systems.attention import AttentionShape, variants
from cs336_systems.attention.variants import BLOCK_SIZE
from cs336_systems.experiments.attention import by_clock
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, PLAIN, dress

_LINE_COLOURS = (*OKABE_ITO, "#999999", "#882255")
_LINE_MARKERS = "osD^vPX*h"
_NO_MEMORY = {"oom": ("x", "ran out of memory"), "predicted-oom": ("o", "not run: would not fit")}
"""Marker and meaning of cells that memory ended; they stand at the top edge, in the colour of their line."""
_ROOM = 0.86
"""Share of an axis that the lines take; above them stands what memory ended."""
_SHAPE = ("gpu", "device", "dtype", "batch_size", "heads", "d_head", "causal")


def scaling_figure(rows: pd.DataFrame) -> Figure | None:
    """Milliseconds of forward and backward (left) and MiB kept between them (right) at each length.

    Lengths for which memory did not suffice stand at the top edge.

    Args:
        rows: of ``benchmark_attention.py``, all of one dtype, batch, number of heads and head dim.

    Raises:
        ValueError: rows of several dtypes or shapes.
    """
    cells = newest(by_clock(rows), [*_SHAPE, "length", "impl"])
    ran = cells[(cells["status"] == "ok") & cells["metric"].isin(("both", "kept_for_backward"))]
    if ran.empty:
        return None
    ended = cells[cells["status"].isin(_NO_MEMORY) & cells["impl"].isin(ran["impl"])]
    shapes = ran[list(_SHAPE)].drop_duplicates()
    if len(shapes) > 1:
        raise ValueError(f"a figure of attention against length takes one shape, got {shapes.to_dict('records')}")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    colours: dict[str, str] = {}
    for i, (impl, own) in enumerate(ran.groupby("impl", sort=False)):
        colours[str(impl)] = _LINE_COLOURS[i % len(_LINE_COLOURS)]
        style = {"color": colours[str(impl)], "marker": _LINE_MARKERS[i % len(_LINE_MARKERS)], "label": str(impl)}
        for axes, metric, scale in ((time_axes, "both", 1), (memory_axes, "kept_for_backward", 1024)):
            line = own[own["metric"] == metric].sort_values("length")
            axes.plot(line["length"], scale * line["median"].astype(float), markersize=5, linewidth=1.5, **style)
    kept = ran[ran["metric"] == "kept_for_backward"]
    _guide(memory_axes, kept, 2)
    _guide(memory_axes, kept, 1)
    for axes, label in (
        (time_axes, "forward and backward, ms (median)"),
        (memory_axes, "kept by forward for backward, MiB"),
    ):
        _dress(axes, sorted({*ran["length"], *ended["length"]}), label)
        _mark_ended(axes, ended, colours)
    handles = [*time_axes.get_legend_handles_labels()[0], *_meanings(ended)]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    first = ran.iloc[0]
    heads = f", {first['heads']} heads" if first["heads"] else ""
    causal = ", causal" if first["causal"] else ""
    figure.suptitle(
        f"Attention on {first['gpu'] or first['device']}: batch {first['batch_size']}{heads}, d {first['d_head']}, "
        f"{first['dtype']}{causal}",
        fontsize=11,
    )
    return figure


def _guide(axes: Axes, kept: pd.DataFrame, power: int) -> None:
    """A dashed line below the implementation whose bytes grow most like a power of the length, if one does."""
    growing = kept.groupby("impl").filter(lambda own: own["length"].nunique() > 1 and round(_growth(own)) == power)
    if growing.empty:
        return
    longest = growing[growing["length"] == growing["length"].max()].sort_values("median")
    end = longest.iloc[-1 if power == 2 else 0]
    last, mib = float(end["length"]), 1024 * float(end["median"])
    lengths = [last / 16, last]
    below = 0.4  # of the point, so that the line is not hidden under what it explains
    axes.plot(lengths, [below * mib * (length / last) ** power for length in lengths], color="0.6", linestyle="--")
    axes.annotate(
        "∝ length²" if power == 2 else "∝ length",
        (lengths[0] * 2, below * mib / 8**power),
        xytext=(4, -8),
        textcoords="offset points",
        ha="left",
        va="center",
        color="0.4",
        fontsize=9,
    )


def _growth(own: pd.DataFrame) -> float:
    """The power of the length with which the bytes of one implementation grow, between its two longest."""
    (first, before), (last, after) = own.sort_values("length")[["length", "median"]].to_numpy(float)[-2:]
    return math.log(after / before) / math.log(last / first)


def _mark_ended(axes: Axes, ended: pd.DataFrame, colours: dict[str, str]) -> None:
    """A marker at the top edge for every length that memory did not suffice for; implementations below each other."""
    if ended.empty:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, bottom * (top / bottom) ** (1 / _ROOM))
    for row, impl in enumerate(impl for impl in colours if (ended["impl"] == impl).any()):
        for status, (marker, _) in _NO_MEMORY.items():
            lengths = ended[(ended["impl"] == impl) & (ended["status"] == status)]["length"]
            axes.plot(
                lengths,
                [0.97 - 0.05 * row] * len(lengths),
                linestyle="",
                marker=marker,
                color=colours[impl],
                fillstyle="none",
                transform=axes.get_xaxis_transform(),
                label=f"_{impl} {status}",
            )


def _meanings(ended: pd.DataFrame) -> list[Line2D]:
    """Legend entries of the markers at the top edge."""
    return [
        Line2D([], [], linestyle="", marker=marker, color="0.4", fillstyle="none", label=meaning)
        for status, (marker, meaning) in _NO_MEMORY.items()
        if (ended["status"] == status).any()
    ]


def _dress(axes: Axes, lengths: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, ha="right", fontsize=8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("sequence length, tokens")
    axes.set_ylabel(label)
    dress(axes)


SKIPPED, MASKED, SEEN = range(3)
COLOURS = ListedColormap(["#E8E8E8", OKABE_ITO[4], OKABE_ITO[0]])
LABELS = {
    SEEN: "seen",
    MASKED: "computed, then masked",
    SKIPPED: f"skipped: block of {BLOCK_SIZE} x {BLOCK_SIZE} without a seen score",
}


def panels(length: int) -> list[tuple[str, variants.Variant, int]]:
    """(title, variant, number of queries) of each picture."""
    bounds = torch.tensor([0.22, 0.36, 0.74]) * length
    ids = torch.bucketize(torch.arange(length), bounds, right=True)[None]
    prefix = variants.prefix_lm(torch.tensor([round(0.3 * length)]))
    window = length // 5
    return [
        ("full", variants.full(), length),
        ("causal", variants.causal(), length),
        (f"sliding window of {window}", variants.sliding_window(window), length),
        ("prefix-LM", prefix, length),
        ("documents", variants.document(ids), length),
        ("documents & causal", variants.document(ids) & variants.causal(), length),
        ("documents & window", variants.document(ids) & variants.sliding_window(window), length),
        (f"causal, the last {length // 2} queries", variants.causal(), length // 2),
    ]


def picture(mask: torch.Tensor) -> np.ndarray:
    """(n_queries, n_keys) of SEEN, MASKED or SKIPPED from a mask whose sizes the block size divides."""
    rows, columns = (size // BLOCK_SIZE for size in mask.shape)
    visited = mask.view(rows, BLOCK_SIZE, columns, BLOCK_SIZE).any(dim=3).any(dim=1)
    visited = visited.repeat_interleave(BLOCK_SIZE, 0).repeat_interleave(BLOCK_SIZE, 1)
    return torch.where(mask, SEEN, torch.where(visited, MASKED, SKIPPED)).numpy()


def draw(axes: Axes, title: str, variant: variants.Variant, n_queries: int, n_keys: int) -> None:
    """One mask, with its shares of skipped blocks and of seen scores."""
    shape = AttentionShape(batch=1, heads=1, kv_heads=1, n_queries=n_queries, n_keys=n_keys, d_head=64)
    mask = variants.dense_mask(variant, shape)[0, 0]
    first = n_keys - n_queries
    axes.imshow(
        picture(mask), cmap=COLOURS, vmin=SKIPPED, vmax=SEEN, extent=(0, n_keys, n_keys, first), interpolation="nearest"
    )
    blocks = range(0, n_keys + 1, BLOCK_SIZE)
    axes.set_xticks(blocks, minor=True)
    axes.set_yticks([block for block in blocks if block >= first], minor=True)
    axes.grid(which="both", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    axes.set_xticks([0, n_keys // 2, n_keys])
    axes.set_yticks([first, (first + n_keys) // 2, n_keys])
    axes.spines[:].set_visible(False)
    axes.set_anchor("N")
    axes.set_title(title, loc="left", fontsize=10, pad=18)
    skipped = variants.block_sparsity(variant, shape)
    shares = f"{100 * mask.double().mean():.0f} % seen, {skipped:.0f} % of blocks skipped"
    axes.annotate(shares, (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8, color="#555555")


def masks_figure(length: int) -> Figure:
    """All pictures of masks over ``length`` keys.

    Raises:
        ValueError: the blocks do not divide the length, or there are fewer than four.
    """
    if length % BLOCK_SIZE or length < 4 * BLOCK_SIZE:
        raise ValueError(f"--length must be a multiple of {BLOCK_SIZE}, at least {4 * BLOCK_SIZE}, got {length}")
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    grid = figure.subplots(2, 4)
    for axes, (title, variant, n_queries) in zip(grid.flat, panels(length), strict=True):
        draw(axes, title, variant, n_queries, length)
    for axes in grid[1]:
        axes.set_xlabel("key position, tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel("query position, tokens")
    handles = [Patch(color=COLOURS(kind), label=label) for kind, label in LABELS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
