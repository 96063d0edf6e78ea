"""Figures of a model benchmark: time and utilisation, the frontier of time and memory, speedups of a dtype.

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
    """Time of the whole pass (left) and share of the limit (right) against context length, or against model size if
    only one length was measured.

    Where the rows hold several modes, the largest is drawn; of settings that are not told apart, such as attention and
    batch size, the value with the most points.
    """
    rows = _one_setting(rows[rows["variant"] != CEILING])
    if rows.empty:
        return None
    x = "context_length" if rows["context_length"].nunique() > 1 else "size"
    rows = rows.assign(how=_how(rows))
    share = next((metric for metric in _SHARES if (rows["metric"] == metric).any()), None)
    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, share_axes = figure.subplots(1, 2)
    entries = _draw(time_axes, rows, "step", x)
    time_axes.set_yscale("log")
    time_axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    time_axes.yaxis.set_major_formatter(WITH_COMMAS)
    time_axes.yaxis.set_minor_formatter(NullFormatter())
    time_axes.set_ylabel("time of the whole pass, ms\n(median, bar p10 to p90)")
    if share:
        _draw(share_axes, rows, share, x)
        share_axes.set_ylabel(_SHARES[share])
    share_axes.set_ylim(bottom=0)
    figure.legend(handles=entries, loc="outside right center", frameon=False, fontsize=9)
    first = rows.iloc[0]
    context = "" if x == "context_length" else f", context {first['context_length']}"
    batch = f"{first['accumulate']} x {first['batch_size']}" if first["accumulate"] != 1 else first["batch_size"]
    policy = "" if first["checkpoint"] == "none" else f", checkpoint {first['checkpoint']}"
    settings = f"batch {batch}{context}{_attention(first)}, AdamW {first['optimizer']}{policy}"
    figure.suptitle(f"{first['mode'].capitalize()} on {first['gpu'] or first['host']}: {settings}", fontsize=11)
    return figure


def _one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each cell that ran in the largest mode and with the commonest value of each fixed setting."""
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


def _how(rows: pd.DataFrame) -> pd.Series:
    """The dtype of each row, and what differs from plain eager training among the settings that are told apart."""
    compiled = rows["compile"].map({how: f", {words}" for how, words in COMPILED.items()}).fillna("")
    captured = rows["cuda_graph"].map({"on": ", CUDA graph"}).fillna("")
    kernels = rows["kernels"].map({"reference": ""}).fillna(", " + rows["kernels"] + " kernels")
    keep = rows["keep"].map({"autograd": ""}).fillna(", keep " + rows["keep"])
    quantized = rows["matmul_dtype"].map({"same": ""}).fillna(", " + rows["matmul_dtype"] + " by " + rows["scaling"])
    return rows["dtype"] + compiled + kernels + keep + quantized + captured


def _attention(first: pd.Series) -> str:
    return "" if first["attention"] == "reference" else f", attention {first['attention']}"


def _draw(axes: Axes, rows: pd.DataFrame, metric: str, x: str) -> list[Line2D]:
    """One line per size and dtype against context length, or per dtype against size; the entries of a legend."""
    hows, sizes = list(dict.fromkeys(rows["how"])), list(dict.fromkeys(rows["size"]))
    colours = {name: OKABE_ITO[i % 7] for i, name in enumerate(sizes if x == "context_length" else hows)}
    styles = {how: {"marker": _MARKERS[i % 8], "linestyle": _DASHES[i % 4]} for i, how in enumerate(hows)}
    lines = rows[rows["metric"] == metric]
    for (coloured, how), group in lines.groupby([lines["size" if x == "context_length" else "how"], "how"], sort=False):
        line = group.sort_values(x) if x == "context_length" else group
        median = line["median"].astype(float)
        bars = [median - line["p10"].astype(float), line["p90"].astype(float) - median]
        shape: dict[str, Any] = {"capsize": 2, "markersize": 5, "linewidth": 1.5, **styles[how]}
        axes.errorbar(line[x], median, yerr=bars, color=colours[coloured], **shape)
    if x == "context_length":
        contexts = sorted(lines[x].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("context length, tokens" if x == "context_length" else "model size")
    dress(axes)
    by_size = [Line2D([], [], color=colours[size], label=size) for size in sizes if x == "context_length"]
    by_how = [Line2D([], [], color=colours.get(how, "grey"), label=how, **styles[how]) for how in hows]  # type: ignore[arg-type]
    return by_size + by_how


_FAMILIES = {
    "every": ("o", "segments of k blocks (full is k = 1)", (8, -3)),
    "first": ("s", "the first m blocks", (-6, -11)),
    "": ("D", "other policies", (6, -11)),
}
"""Kinds of checkpointing policies: marker, name in the legend, and where a point's name stands, in points from it."""
_COLOURS = dict(zip(_FAMILIES, OKABE_ITO, strict=False))
_MOST_PANELS = 3


def frontier_figure(rows: pd.DataFrame) -> Figure | None:
    """Draw what activation checkpointing gains: peak GiB against ms of the whole pass, a point for every policy.

    Lines join the lengths of segments and the numbers of checkpointed blocks, an open marker is the predicted peak, and
    the grey staircase is the frontier: no policy needs less of both than a point on it. A panel for each of the three
    models and settings with the most policies, in the largest mode; policies that did not run are named in its title.
    """
    rows = rows[rows["variant"] != CEILING]
    if rows.empty:
        return None
    rows = rows[rows["mode"] == max(rows["mode"].unique(), key=MODES.index)]
    settings = ["gpu", *(column for column in SETTINGS if column not in ("checkpoint", "steps"))]
    rows = newest(rows, [*settings, "checkpoint"])
    groups = [(group, _points(group)) for _, group in rows.groupby(settings, sort=False, dropna=False)]
    groups = sorted((pair for pair in groups if len(pair[1]) > 1), key=lambda pair: -len(pair[1]))[:_MOST_PANELS]
    if not groups:
        return None
    figure = Figure(figsize=(6.5 * len(groups), 5), layout="constrained")
    for axes, (group, points) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        _draw_panel(axes, points)
        axes.set_title(_title(group), fontsize=10)
    drawn = {family for _, points in groups for family, members in _families(points.index).items() if members}
    entries = [
        Line2D([], [], color=_COLOURS[family], marker=marker, linestyle="-" if family else "", label=name)
        for family, (marker, name, _) in _FAMILIES.items()
        if family in drawn
    ]
    entries.append(Line2D([], [], color="grey", marker="o", mfc="white", linestyle="", label="predicted peak"))
    entries.append(Line2D([], [], color="0.8", linewidth=4, label="frontier"))
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
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
        family: sorted((p for p in policies if p.startswith(f"{family}-")), key=lambda p: int(p.rpartition("-")[2]))
        for family in ("every", "first")
    }
    full, none = ([name] if name in policies else [] for name in ("full", "none"))
    lines = {"every": full + counted["every"], "first": none + counted["first"] + full if counted["first"] else []}
    joined = {policy for line in lines.values() for policy in line}
    return lines | {"": [policy for policy in policies if policy not in joined]}


def _draw_panel(axes: Axes, points: pd.DataFrame) -> None:
    front = points.sort_values(["step", "peak_memory"])
    front = front[front["peak_memory"] < front["peak_memory"].cummin().shift(fill_value=float("inf"))]
    axes.step(front["step"], front["peak_memory"], where="post", color="0.8", linewidth=4, zorder=0)
    labelled: set[str] = set()
    for family, policies in _families(points.index).items():
        line, colour = points.loc[policies], _COLOURS[family]
        style: dict[str, Any] = {"marker": _FAMILIES[family][0], "color": colour}
        measured, predicted = line["peak_memory"], line["predicted_peak_memory"]
        axes.plot(line["step"], measured, ls="-" if family else "none", zorder=2, **style)
        axes.vlines(line["step"], measured, predicted, color=colour, linewidth=0.8)
        axes.plot(line["step"], predicted, ls="none", mfc="white", markersize=4, zorder=3, **style)
        for policy in [policy for policy in policies if policy not in labelled]:
            offset = _FAMILIES["first" if policy == "full" else family][2]
            side: Any = {"ha": "right" if offset[0] < 0 else "left", "textcoords": "offset points", "fontsize": 8}
            axes.annotate(policy, (line.loc[policy, "step"], measured[policy]), offset, color=colour, **side)
        labelled |= set(policies)
    axes.set_ylim(0, 1.08 * max(points["peak_memory"].max(), points["predicted_peak_memory"].fillna(0).max()))
    axes.margins(x=0.14)
    axes.set_xlabel("time of the whole pass, ms (median)")
    axes.set_ylabel("peak memory, GiB")
    dress(axes)


def _title(group: pd.DataFrame) -> str:
    """The model, where it ran, and what did not run."""
    first = group.iloc[0]
    compiled = f", {COMPILED[first['compile']]}" if first["compile"] in COMPILED else ""
    several = f" x {first['accumulate']}" if first["accumulate"] != 1 else ""
    captured = ", CUDA graph" if first["cuda_graph"] == "on" else ""
    title = (
        f"{first['size']} {first['mode']} on {first['gpu'] or first['host']}\n"
        f"batch {first['batch_size']}{several}, context {first['context_length']}, {first['dtype']}"
        f"{_attention(first)}{compiled}{captured}"
    )
    missing = [f"{row['checkpoint']}: {row['status']}" for _, row in group[group["status"] != "ok"].iterrows()]
    return f"{title}\n({', '.join(missing)})" if missing else title


_STYLES = {"forward": ("o", "-"), "backward": ("s", "--"), "optimizer": ("^", ":"), "step": ("D", "-.")}


def speedups_figure(rows: pd.DataFrame, slow: str = "fp32", fast: str = "autocast-bf16") -> Figure | None:
    """How many times as fast one dtype is as another, a line per phase, against model size.

    Args:
        rows: of one setting but for size and dtype.
    """
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
