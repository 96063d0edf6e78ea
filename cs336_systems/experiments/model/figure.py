"""Figures of a step benchmark: time and utilisation against context length or model size, as PNG.

Legible in print: units on the axes, the Okabe-Ito colours that colour-blind readers can tell apart, a marker for each
dtype, and what all points share in the title. Drawn without pyplot, so importing this touches no display.
"""

from typing import Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from cs336_systems.case import COMPILED
from cs336_systems.config import MODES
from cs336_systems.experiments.model.cells import CEILING
from cs336_systems.experiments.options import RECIPE
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, WITH_COMMAS, dress

_MARKERS = "osD^vPX*"
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_FIXED = ("device", "attention", "batch_size", "accumulate", "checkpoint", "optimizer", "warmup")
_SHARES = {
    "mfu": "MFU: % of the dtype's datasheet peak\n(model FLOPs, causal)",
    "matmul_ceiling_share": "% of the measured matmul ceiling\n(model FLOPs, causal)",
}


def step_figure(rows: pd.DataFrame) -> Figure | None:
    """Time of the whole pass (left) and share of the limit (right) of step rows.

    The x axis is context length if several were measured, else model size. Where the rows hold several modes, the
    largest is drawn; where they hold several kinds of attention, batch sizes, checkpointing policies, optimizers or
    warm-ups, the one with the most points.
    """
    rows = _one_setting(rows[rows["variant"] != CEILING])
    if rows.empty:
        return None
    compiled = rows["compile"].map({how: f", {words}" for how, words in COMPILED.items()}).fillna("")
    captured = rows["cuda_graph"].map({"on": ", CUDA graph"}).fillna("")
    kernels = rows["kernels"].map({"reference": ""}).fillna(", " + rows["kernels"] + " kernels")
    keep = rows["keep"].map({"autograd": ""}).fillna(", keep " + rows["keep"])
    quantized = rows["matmul_dtype"].map({"same": ""}).fillna(", " + rows["matmul_dtype"] + " by " + rows["scaling"])
    rows = rows.assign(how=rows["dtype"] + compiled + kernels + keep + quantized + captured)
    x = "context_length" if rows["context_length"].nunique() > 1 else "size"
    share = next((metric for metric in _SHARES if (rows["metric"] == metric).any()), None)
    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, share_axes = figure.subplots(1, 2)
    series = _series(rows, x)
    _draw(time_axes, rows[rows["metric"] == "step"], x, series)
    time_axes.set_yscale("log")
    time_axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    time_axes.yaxis.set_major_formatter(WITH_COMMAS)
    time_axes.yaxis.set_minor_formatter(NullFormatter())
    time_axes.set_ylabel("time of the whole pass, ms\n(median, bar p10 to p90)")
    if share:
        _draw(share_axes, rows[rows["metric"] == share], x, series)
        share_axes.set_ylabel(_SHARES[share])
    share_axes.set_ylim(bottom=0)
    figure.legend(handles=_legend(rows, x), loc="outside right center", frameon=False, fontsize=9)
    first = rows.iloc[0]
    where = first["gpu"] or first["host"]
    context = "" if x == "context_length" else f", context {first['context_length']}"
    policy = "" if first["checkpoint"] == "none" else f", checkpoint {first['checkpoint']}"
    attention = "" if first["attention"] == "reference" else f", attention {first['attention']}"
    batch = f"{first['accumulate']} x {first['batch_size']}" if first["accumulate"] != 1 else first["batch_size"]
    settings = f"batch {batch}{context}{attention}, AdamW {first['optimizer']}{policy}"
    figure.suptitle(f"{first['mode'].capitalize()} on {where}: {settings}", fontsize=11)
    return figure


def _one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """What ran of the largest mode and of one value of each fixed setting, the newest run of each cell."""
    ran = rows[rows["status"] == "ok"]
    if ran.empty:
        return ran
    for column in ("mode", *_FIXED):
        most = ran[column].mode()
        chosen = "none" if (most == "none").any() else most.iloc[0]
        chosen = max(ran["mode"].unique(), key=MODES.index) if column == "mode" else chosen
        ran, rows = (side[side[column] == chosen] for side in (ran, rows))
    found = newest(rows, ["size", "context_length", "dtype", "compile", "kernels", "keep", *RECIPE, "cuda_graph"])
    return found[found["status"] == "ok"]


def _series(rows: pd.DataFrame, x: str) -> tuple[list[str], list[str]]:
    """Values that are told apart by colour and those told apart by marker and dash."""
    hows = list(dict.fromkeys(rows["how"]))
    return (list(dict.fromkeys(rows["size"])), hows) if x == "context_length" else (hows, hows)


def _draw(axes: Axes, rows: pd.DataFrame, x: str, series: tuple[list[str], list[str]]) -> None:
    """One line per size and dtype against context length, or per dtype against size."""
    colours, styles = series
    groups = ["size", "how"] if x == "context_length" else ["how", "how"]
    for (coloured, styled), group in rows.groupby([rows[groups[0]], rows[groups[1]].rename("style")], sort=False):
        line = group.sort_values(x) if x == "context_length" else group
        median = line["median"].astype(float)
        axes.errorbar(
            line[x],
            median,
            yerr=[median - line["p10"].astype(float), line["p90"].astype(float) - median],
            color=OKABE_ITO[colours.index(str(coloured)) % len(OKABE_ITO)],
            marker=_MARKERS[styles.index(str(styled)) % len(_MARKERS)],
            linestyle=_DASHES[styles.index(str(styled)) % len(_DASHES)],
            capsize=2,
            markersize=5,
            linewidth=1.5,
        )
    if x == "context_length":
        contexts = sorted(rows[x].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("context length, tokens")
    else:
        axes.set_xlabel("model size")
    dress(axes)


def _legend(rows: pd.DataFrame, x: str) -> list[Line2D]:
    """One entry per size (colour) and per dtype (marker and dash), instead of one per line."""
    colours, styles = _series(rows, x)
    both = x == "context_length"
    by_style = []
    for i, how in enumerate(styles):
        colour = "grey" if both else OKABE_ITO[i % len(OKABE_ITO)]
        by_style.append(Line2D([], [], color=colour, marker=_MARKERS[i % 8], linestyle=_DASHES[i % 4], label=how))
    by_colour = [Line2D([], [], color=OKABE_ITO[i % len(OKABE_ITO)], label=size) for i, size in enumerate(colours)]
    return by_colour + by_style if both else by_style
