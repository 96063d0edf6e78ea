"""Heatmaps over device and host memory: tokens/s, TFLOP/s, MFU and HFU of one model, a line for each length, as PNG.

Measured cells where there are any, else simulated ones; a fifth map is simulated over measured time. A cell without a
number holds no plan, or failed.
"""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import dress

_MAPS = (
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("model_tflops", "TFLOP/s, model", ".0f"),
    ("mfu", "MFU, %", ".1f"),
    ("hfu", "HFU, %", ".1f"),
)
_AGREEMENT = ("simulated_over_measured", "simulated / measured", ".2f")
_OF = ["gpu", "simulated_device", "size", "context_length"]


def heatmaps(rows: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) for every model and length; peers have no capacities."""
    for _, own in rows[rows["device_gib"] > 0].groupby(_OF, sort=False, dropna=False):
        simulated, size, length = (own.iloc[0][name] for name in _OF[1:])
        if (figure := heatmap_figure(own)) is not None:
            yield "_".join([size, str(int(length)), *([simulated] if simulated else [])]), figure


def heatmap_figure(rows: pd.DataFrame) -> Figure | None:
    """Draw one model on one device, a line of maps for each length, the fastest of a cell's several settings."""
    settings = ["gpu", "device", "simulated_device", "size", "context_length", "device_gib", "host_gib", "order"]
    found = newest(rows, [*settings, "chunk", "tokens_per_step", "clipping", "master"])
    prefix = "" if (found["metric"] == "tokens_per_s").any() else "simulated_"
    maps = [(prefix + metric, title, form) for metric, title, form in _MAPS]
    maps += [_AGREEMENT] if not prefix and (found["metric"] == _AGREEMENT[0]).any() else []
    if not (found["metric"] == maps[0][0]).any():
        return None
    lengths = sorted(found["context_length"].unique())
    figure = Figure(figsize=(3.6 * len(maps), 0.6 + 3.0 * len(lengths)), layout="constrained")
    grid = figure.subplots(len(lengths), len(maps), squeeze=False)
    for line, length in zip(grid, lengths, strict=True):
        of_length = found[found["context_length"] == length]
        for axes, (metric, title, form) in zip(line, maps, strict=True):
            _heatmap(axes, of_length, metric, form)
            axes.set_title(f"{title}, sequences of {int(length):,}", fontsize=10)
    gpu, simulated, size, _ = (found.iloc[0][name] for name in _OF)
    where = f"simulated for {simulated}" if simulated else f"{'measured' if not prefix else 'simulated'} on {gpu}"
    figure.suptitle(f"{size}, tokens per second and shares of the peak under caps, {where}", fontsize=11)
    return figure


def _heatmap(axes: Axes, rows: pd.DataFrame, metric: str, form: str) -> None:
    grid = pd.pivot_table(
        rows.assign(value=rows["median"].where(rows["metric"] == metric)),
        index="host_gib",
        columns="device_gib",
        values="value",
        aggfunc="max",
        dropna=False,
    ).sort_index()
    axes.imshow(grid.to_numpy(dtype=float), origin="lower", aspect="auto", cmap="cividis")
    axes.set_xticks(range(len(grid.columns)), [f"{value:g}" for value in grid.columns])
    axes.set_yticks(range(len(grid.index)), [f"{value:g}" for value in grid.index])
    axes.set_xlabel("device memory, GiB")
    axes.set_ylabel("host memory, GiB")
    middle = (grid.min().min() + grid.max().max()) / 2
    for i, host in enumerate(grid.index):
        for j, gib in enumerate(grid.columns):
            value = grid.loc[host, gib]
            text = "none" if value != value else format(value, form)
            colour = "white" if value <= middle else "black"  # on white, where there is none
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=9)
    dress(axes)
    axes.grid(visible=False)
