"""What activation checkpointing gains: peak memory against step time, a point for every policy, as PNG.

One panel for each model and setting that was measured under several policies. Lines join the lengths of segments
(``every-k``, where ``full`` is k = 1) and the numbers of checkpointed blocks (``first-m``, from ``none`` to ``full``);
an open marker above or below a point is the predicted peak. The grey staircase is the frontier: no policy measured
needs both less time and less memory than a point on it. Policies that did not run are named with their status.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cs336_systems.case import COMPILED
from cs336_systems.config import MODES
from cs336_systems.experiments.model.cells import CEILING
from cs336_systems.experiments.model.table import SETTINGS
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, dress

_FAMILIES = {"every": "segments of k blocks (full is k = 1)", "first": "the first m blocks", "": "other policies"}
_COLOURS = dict(zip(_FAMILIES, OKABE_ITO, strict=False))
_MARKERS = {"every": "o", "first": "s", "": "D"}
_LABELS_AT = {"every": (8, -3), "first": (-6, -11), "": (6, -11)}
"""Where a point's name stands, in points from it: neighbours of different families do not overprint each other."""

_MOST_PANELS = 3


def frontier_figure(rows: pd.DataFrame) -> Figure | None:
    """Peak GiB against milliseconds of the whole pass.

    Nothing is drawn unless some model was measured under several policies. Of the modes the largest is taken, and of
    the models and settings the three with the most policies.

    Args:
        rows: of ``benchmark_model.py``, as ``read_rows`` returns them.
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
    figure.legend(handles=_legend(groups), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _points(group: pd.DataFrame) -> pd.DataFrame:
    """One line per policy that ran: ``step`` in ms, ``peak_memory`` and, if known, ``predicted_peak_memory`` in GiB."""
    ran = group[(group["status"] == "ok") & (group["metric"] != "")]
    table = ran.pivot_table(index="checkpoint", columns="metric", values="median", sort=False)
    points = table.reindex(columns=["step", "peak_memory", "predicted_peak_memory"])
    return points.dropna(subset=["step", "peak_memory"])


def _families(policies: pd.Index) -> dict[str, list[str]]:
    """Policies by family, in the order in which a line joins them; ``full`` and ``none`` end the lines."""
    counted = {family: sorted((p for p in policies if p.startswith(f"{family}-")), key=_count) for family in _MARKERS}
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
        style: dict[str, Any] = {"marker": _MARKERS[family], "color": _COLOURS[family]}
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


def _legend(groups: list[pd.DataFrame]) -> list[Line2D]:
    drawn = {family for group in groups for family, members in _families(_points(group).index).items() if members}
    entries = [
        Line2D([], [], color=_COLOURS[f], marker=_MARKERS[f], linestyle="-" if f else "", label=_FAMILIES[f])
        for f in _FAMILIES
        if f in drawn
    ]
    predicted = Line2D([], [], color="grey", marker="o", markerfacecolor="white", linestyle="", label="predicted peak")
    return [*entries, predicted, Line2D([], [], color="0.8", linewidth=4, label="frontier")]
