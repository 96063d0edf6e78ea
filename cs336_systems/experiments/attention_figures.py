"""Figures of attention: time and memory against sequence length, and masks as FlexAttention runs them."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from cs336_systems.attention import AttentionShape, variants
from cs336_systems.attention.variants import BLOCK_SIZE
from cs336_systems.experiments.attention import by_clock
from cs336_systems.experiments.peers import panels
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, PLAIN

_COLOURS = (*OKABE_ITO, "#999999", "#882255")
_MARKERS = "osD^vPX*h"
_NO_MEMORY = ("oom", "predicted-oom")
_SHAPE = ("gpu", "device", "dtype", "batch_size", "heads", "d_head", "causal")
_PANELS = {
    "both": ("forward and backward, ms (median)", 1),
    "kept_for_backward": ("kept by forward for backward, MiB", 1024),
}
"""The label of each panel, and its units in one of the metric's."""


def scaling_figure(rows: pd.DataFrame) -> Figure | None:
    """Milliseconds of forward and backward (left) and MiB kept between them (right) at each length.

    Lengths for which memory did not suffice are crosses at the top edge.

    Args:
        rows: of ``benchmark_attention.py``, all of one dtype, batch, number of heads and head dim.

    Raises:
        ValueError: rows of several dtypes or shapes.
    """
    cells = newest(by_clock(rows), [*_SHAPE, "length", "impl"])
    ran = cells[(cells["status"] == "ok") & cells["metric"].isin(list(_PANELS))]
    if ran.empty:
        return None
    shapes = ran[list(_SHAPE)].drop_duplicates()
    if len(shapes) > 1:
        raise ValueError(f"a figure of attention against length takes one shape, got {shapes.to_dict('records')}")
    figure, both = panels(2, 2, 4.7, 3.9)
    for axes, (metric, (label, units)) in zip(both, _PANELS.items(), strict=True):
        for i, impl in enumerate(ran["impl"].unique()):
            own = cells[cells["impl"] == impl]
            line = own[own["metric"] == metric].sort_values("length")
            colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
            height = units * line["median"].astype(float)
            axes.plot(line["length"], height, color=colour, marker=marker, markersize=5, label=impl)
            ended = own["length"][own["status"].isin(_NO_MEMORY)]
            top = [0.97 - 0.05 * i] * len(ended)
            axes.plot(ended, top, "x", color=colour, transform=axes.get_xaxis_transform())
        lengths = sorted(cells["length"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, ha="right", fontsize=8)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set_xlabel("sequence length, tokens")
        axes.set_ylabel(label)
    ended_by = Line2D([], [], linestyle="", marker="x", color="0.4", label="memory did not suffice")
    handles = [*both[0].get_legend_handles_labels()[0], ended_by]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    first = ran.iloc[0]
    heads, causal = f", {first['heads']} heads" * bool(first["heads"]), ", causal" * bool(first["causal"])
    shape = f"batch {first['batch_size']}{heads}, d {first['d_head']}, {first['dtype']}{causal}"
    figure.suptitle(f"Attention on {first['gpu'] or first['device']}: {shape}", fontsize=11)
    return figure


SKIPPED, MASKED, SEEN = range(3)
COLOURS = ListedColormap(["#E8E8E8", OKABE_ITO[4], OKABE_ITO[0]])
LABELS = {
    SEEN: "seen",
    MASKED: "computed, then masked",
    SKIPPED: f"skipped: block of {BLOCK_SIZE} x {BLOCK_SIZE} without a seen score",
}


def drawn_masks(length: int) -> list[tuple[str, variants.Variant, int]]:
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
    style: dict[str, Any] = {"cmap": COLOURS, "vmin": SKIPPED, "vmax": SEEN, "interpolation": "nearest"}
    axes.imshow(picture(mask), extent=(0, n_keys, n_keys, first), **style)
    axes.set_axisbelow(False)  # the grid shows the blocks
    axes.grid(which="both", color="white", linewidth=0.6)
    blocks = range(0, n_keys + 1, BLOCK_SIZE)
    axes.set_xticks(blocks, minor=True)
    axes.set_yticks([block for block in blocks if block >= first], minor=True)
    axes.set_xticks([0, n_keys // 2, n_keys])
    axes.set_yticks([first, (first + n_keys) // 2, n_keys])
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
    drawn = drawn_masks(length)
    figure, every = panels(len(drawn), 4, 2.4, 2.8)
    for axes, (title, variant, n_queries) in zip(every, drawn, strict=True):
        draw(axes, title, variant, n_queries, length)
    figure.supxlabel("key position, tokens", fontsize=10)
    figure.supylabel("query position, tokens", fontsize=10)
    handles = [Patch(color=COLOURS(kind), label=label) for kind, label in LABELS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure
