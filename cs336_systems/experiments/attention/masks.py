"""Attention masks as pictures: what FlexAttention runs, and what skipping empty blocks leaves of their scores."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.attention import AttentionShape, variants
from cs336_systems.attention.variants import BLOCK_SIZE
from cs336_systems.report.figures import OKABE_ITO

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
