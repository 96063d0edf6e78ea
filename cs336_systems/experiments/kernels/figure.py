"""Share of the copy ceiling that each kernel reaches, forward and backward, by implementation, as PNG."""

from math import ceil
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cs336_systems.experiments.kernels.cells import BY_FLOPS, KERNELS
from cs336_systems.experiments.kernels.table import KERNEL_TABLE
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, dress

_MARKERS = "osD^vPX*"
_PASSES = ("forward", "backward")
_COLUMNS = 7
"""Panels beside each other, as wide as can be read in a page."""


def shares_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each pass of each kernel whose bound is memory: % of a copy's bandwidth by width, a line for a way.

    Where the rows hold several dtypes or numbers of rows, the one with the most points is drawn.
    """
    cells = newest(rows, [name for name in KERNEL_TABLE.settings if name in rows])
    shares = cells[cells["metric"].isin([f"{name}_copy_share" for name in _PASSES])]
    shares = shares[(shares["status"] == "ok") & ~shares["kernel"].isin(BY_FLOPS)]
    for setting in ("gpu", "dtype", "rows"):
        if not shares.empty:
            shares = shares[shares[setting] == shares[setting].mode().iloc[-1]]
    drawn = [
        (kernel, name, own)
        for kernel in KERNELS
        for name in _PASSES
        if not (own := shares[(shares["kernel"] == kernel) & (shares["metric"] == f"{name}_copy_share")]).empty
    ]
    if not drawn:
        return None
    hows = list(dict.fromkeys(shares["how"]))
    n_columns = min(len(drawn), _COLUMNS)
    n_rows = ceil(len(drawn) / n_columns)
    figure = Figure(figsize=(1.5 + 2.3 * n_columns, 0.6 + 2.4 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(drawn) :]:
        axes.set_visible(False)
    for axes, (kernel, name, own) in zip(panels.flat, drawn, strict=False):
        widths = sorted(own["width"].unique())
        for how, line in own.groupby("how", sort=False):
            points = line.sort_values("width")
            axes.plot(points["width"].map(widths.index), points["median"].astype(float), **_style(hows.index(str(how))))
        axes.set_xticks(range(len(widths)), [f"{width:,}" for width in widths], rotation=60, ha="right", fontsize=7)
        axes.axhline(100, color="0.6", linestyle="--", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{kernel}\n{name}", fontsize=9)
        dress(axes)
    for row in panels:
        row[0].set_ylabel("% of a copy's bandwidth", fontsize=9)
    figure.supxlabel("width, elements per row", fontsize=10)
    handles = [Line2D([], [], label=how, **_style(number)) for number, how in enumerate(hows)]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    first = shares.iloc[0]
    where = first["gpu"] or first["device"]
    figure.suptitle(f"Fused kernels on {where}: {first['rows']:,} rows, {first['dtype']}", fontsize=11)
    return figure


def _style(number: int) -> dict[str, Any]:
    """Of the line of the way with this number."""
    colour, marker = OKABE_ITO[number % len(OKABE_ITO)], _MARKERS[number % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.3}
