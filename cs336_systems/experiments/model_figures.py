"""Figures of a model benchmark, as PNG: time and utilisation, the frontier of time and memory, speedups of a dtype.

``step_figure`` draws time and share of the limit against context length or model size.

``frontier_figure`` draws what activation checkpointing gains: peak memory against step time, a point for every policy.
One panel for each model and setting that was measured under several policies. Lines join the lengths of segments
(``every-k``, where ``full`` is k = 1) and the numbers of checkpointed blocks (``first-m``, from ``none`` to ``full``);
an open marker above or below a point is the predicted peak. The grey staircase is the frontier: no policy measured
needs both less time and less memory than a point on it. Policies that did not run are named with their status.

``speedups_figure`` draws how many times as fast one dtype is as another, phase by phase, against model size.

All take rows of ``benchmark_model.py``, as ``read_rows`` returns them, and return None where there is nothing to draw.
"""

from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from cs336_systems.case import COMPILED, RECIPE
from cs336_systems.config import MODES
from cs336_systems.experiments.model import CEILING, SETTINGS
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, WITH_COMMAS, dress

_MARKERS = "osD^vPX*"
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_TOLD_APART = ("size", "context_length", "dtype", "compile", "kernels", "keep", *RECIPE, "cuda_graph")
"""Settings that points of one figure may differ in."""
_SHARES = {
    "mfu": "MFU: % of the dtype's datasheet peak\n(model FLOPs, causal)",
    "matmul_ceiling_share": "% of the measured matmul ceiling\n(model FLOPs, causal)",
}


def step_figure(rows: pd.DataFrame) -> Figure | None:
    """Time of the whole pass (left) and share of the limit (right) of step rows.

    The x axis is context length if several were measured, else model size. Where the rows hold several modes, the
    largest is drawn; of settings that are not told apart, such as attention and batch size, the value with the most
    points.
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
    for column in ("mode", *(name for name in SETTINGS if name not in (*_TOLD_APART, "mode", "steps"))):
        most = ran[column].mode()
        chosen = "none" if (most == "none").any() else most.iloc[0]
        chosen = max(ran["mode"].unique(), key=MODES.index) if column == "mode" else chosen
        ran, rows = (side[side[column] == chosen] for side in (ran, rows))
    found = newest(rows, list(_TOLD_APART))
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


_FAMILIES = {"every": "segments of k blocks (full is k = 1)", "first": "the first m blocks", "": "other policies"}
_COLOURS = dict(zip(_FAMILIES, OKABE_ITO, strict=False))
_FAMILY_MARKERS = {"every": "o", "first": "s", "": "D"}
_LABELS_AT = {"every": (8, -3), "first": (-6, -11), "": (6, -11)}
"""Where a point's name stands, in points from it: neighbours of different families do not overprint each other."""

_MOST_PANELS = 3


def frontier_figure(rows: pd.DataFrame) -> Figure | None:
    """Peak GiB against milliseconds of the whole pass.

    Nothing is drawn unless some model was measured under several policies. Of the modes the largest is taken, and of
    the models and settings the three with the most policies.
    """
    rows = rows[rows["variant"] != CEILING]
    if rows.empty:
        return None
    rows = rows[rows["mode"] == max(rows["mode"].unique(), key=MODES.index)]
    settings = ["gpu", *(column for column in SETTINGS if column not in ("checkpoint", "steps"))]
    rows = newest(rows, [*settings, "checkpoint"])
    groups = [group for _, group in rows.groupby(settings, sort=False, dropna=False) if len(_points(group)) > 1]
    groups = sorted(groups, key=lambda group: -len(_points(group)))[:_MOST_PANELS]
    if not groups:
        return None
    figure = Figure(figsize=(6.5 * len(groups), 5), layout="constrained")
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        _draw_panel(axes, group)
    figure.legend(handles=_frontier_legend(groups), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _points(group: pd.DataFrame) -> pd.DataFrame:
    """One line per policy that ran: ``step`` in ms, ``peak_memory`` and, if known, ``predicted_peak_memory`` in GiB."""
    ran = group[(group["status"] == "ok") & (group["metric"] != "")]
    table = ran.pivot_table(index="checkpoint", columns="metric", values="median", sort=False)
    points = table.reindex(columns=["step", "peak_memory", "predicted_peak_memory"])
    return points.dropna(subset=["step", "peak_memory"])


def _families(policies: pd.Index) -> dict[str, list[str]]:
    """Policies by family, in the order in which a line joins them; ``full`` and ``none`` end the lines."""
    counted = {
        family: sorted((p for p in policies if p.startswith(f"{family}-")), key=_count) for family in _FAMILY_MARKERS
    }
    some_first = bool(counted["first"])
    every = [p for p in ("full",) if p in policies] + counted["every"]
    first = [p for p in ("none",) if p in policies] + counted["first"] + [p for p in ("full",) if p in policies]
    named = set(counted["every"]) | set(counted["first"]) | ({"full"} if "full" in policies else set())
    others = [p for p in policies if p not in named and not (some_first and p == "none")]
    return {"every": every, "first": first if some_first else [], "": others}


def _count(policy: str) -> int:
    return int(policy.rpartition("-")[2])


def _draw_panel(axes: Axes, group: pd.DataFrame) -> None:
    points = _points(group)
    front = points.sort_values(["step", "peak_memory"])
    front = front[front["peak_memory"] < front["peak_memory"].cummin().shift(fill_value=float("inf"))]
    axes.step(front["step"], front["peak_memory"], where="post", color="0.8", linewidth=4, zorder=0)
    labelled: set[str] = set()
    for family, policies in _families(points.index).items():
        line = points.loc[policies]
        style: dict[str, Any] = {"marker": _FAMILY_MARKERS[family], "color": _COLOURS[family]}
        measured, predicted = line["peak_memory"], line["predicted_peak_memory"]
        axes.plot(line["step"], measured, ls="-" if family else "none", zorder=2, **style)
        axes.vlines(line["step"], measured, predicted, color=_COLOURS[family], linewidth=0.8)
        axes.plot(line["step"], predicted, ls="none", mfc="white", markersize=4, zorder=3, **style)
        for policy in [policy for policy in policies if policy not in labelled]:
            labelled.add(policy)
            right, up = _LABELS_AT["first" if policy == "full" else family]
            axes.annotate(
                policy,
                (line.loc[policy, "step"], measured[policy]),
                xytext=(right, up),
                textcoords="offset points",
                ha="right" if right < 0 else "left",
                color=_COLOURS[family],
                fontsize=8,
            )
    axes.set_ylim(0, 1.08 * max(points["peak_memory"].max(), points["predicted_peak_memory"].fillna(0).max()))
    axes.margins(x=0.14)
    axes.set_xlabel("time of the whole pass, ms (median)")
    axes.set_ylabel("peak memory, GiB")
    dress(axes)
    axes.set_title(_title(group), fontsize=10)


def _title(group: pd.DataFrame) -> str:
    """The model, where it ran, and what did not run."""
    first = group.iloc[0]
    compiled = f", {COMPILED[first['compile']]}" if first["compile"] in COMPILED else ""
    attention = "" if first["attention"] == "reference" else f", attention {first['attention']}"
    several = f" x {first['accumulate']}" if first["accumulate"] != 1 else ""
    captured = ", CUDA graph" if first["cuda_graph"] == "on" else ""
    title = (
        f"{first['size']} {first['mode']} on {first['gpu'] or first['host']}\n"
        f"batch {first['batch_size']}{several}, context {first['context_length']}, {first['dtype']}"
        f"{attention}{compiled}{captured}"
    )
    failed = group[group["status"] != "ok"]
    missing = [f"{row['checkpoint']}: {row['status']}" for _, row in failed.iterrows()]
    return f"{title}\n({', '.join(missing)})" if missing else title


def _frontier_legend(groups: list[pd.DataFrame]) -> list[Line2D]:
    drawn = {family for group in groups for family, members in _families(_points(group).index).items() if members}
    entries = [
        Line2D([], [], color=_COLOURS[f], marker=_FAMILY_MARKERS[f], linestyle="-" if f else "", label=_FAMILIES[f])
        for f in _FAMILIES
        if f in drawn
    ]
    predicted = Line2D([], [], color="grey", marker="o", markerfacecolor="white", linestyle="", label="predicted peak")
    return [*entries, predicted, Line2D([], [], color="0.8", linewidth=4, label="frontier")]


_STYLES = {"forward": ("o", "-"), "backward": ("s", "--"), "optimizer": ("^", ":"), "step": ("D", "-.")}


def speedups_figure(rows: pd.DataFrame, slow: str = "fp32", fast: str = "autocast-bf16") -> Figure | None:
    """A line per phase, sizes in the order of the rows, which are of one setting but for size and dtype."""
    rows = newest(rows[(rows["mode"] == "step") & (rows["compile"] == "off")], ["size", "dtype"])
    rows = rows[rows["status"] == "ok"]
    times = rows.pivot_table(index="size", columns=["dtype", "metric"], values="median", sort=False)
    if slow not in times or fast not in times:
        return None
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, (phase, (marker, dashes)) in enumerate(_STYLES.items()):
        ratio = (times[slow][phase] / times[fast][phase]).dropna()
        label = "whole step" if phase == "step" else phase
        axes.plot(ratio.index, ratio, marker=marker, ls=dashes, color=OKABE_ITO[i], label=label)
    axes.axhline(1, color="0.6", lw=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("model size")
    axes.set_ylabel(f"time in {slow} / time in {fast}")
    first = rows.iloc[0]
    axes.set_title(f"{first['gpu']}: batch {first['batch_size']}, context {first['context_length']}", fontsize=10)
    dress(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure
