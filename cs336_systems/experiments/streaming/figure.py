"""Heatmaps over device and host memory: tokens/s, TFLOP/s, MFU and HFU of one model and length, as PNG.

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
    """(name, figure) for every model and length; of several settings of a cell the fastest is drawn."""
    settings = ["gpu", "device", "simulated_device", "size", "context_length", "device_gib", "host_gib", "order"]
    found = newest(rows, [*settings, "chunk", "tokens_per_step", "clipping", "master"])
    for _, own in found.groupby(_OF, sort=False, dropna=False):
        gpu, simulated, size, length = (own.iloc[0][name] for name in _OF)
        prefix = "" if (own["metric"] == "tokens_per_s").any() else "simulated_"
        maps = [(prefix + metric, title, form) for metric, title, form in _MAPS]
        maps += [_AGREEMENT] if not prefix and (own["metric"] == _AGREEMENT[0]).any() else []
        if not (own["metric"] == maps[0][0]).any():
            continue
        figure = Figure(figsize=(3.6 * len(maps), 3.6), layout="constrained")
        for axes, (metric, title, form) in zip(figure.subplots(1, len(maps), squeeze=False).flat, maps, strict=True):
            _heatmap(axes, own, metric, form)
            axes.set_title(title, fontsize=10)
        where = f"simulated for {simulated}" if simulated else f"{'measured' if not prefix else 'simulated'} on {gpu}"
        figure.suptitle(f"{size}, sequences of {int(length):,} tokens, {where}", fontsize=11)
        yield "_".join([size, str(int(length)), *([simulated] if simulated else [])]), figure


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
    middle = grid.stack().median()
    for i, host in enumerate(grid.index):
        for j, gib in enumerate(grid.columns):
            value = grid.loc[host, gib]
            text = "none" if value != value else format(value, form)
            axes.text(
                j, i, text, ha="center", va="center", color="white" if not value > middle else "black", fontsize=9
            )
    dress(axes)
    axes.grid(visible=False)
