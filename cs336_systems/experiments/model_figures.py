"""Figures of a model benchmark: time and utilisation, and what checkpointing gives in memory for time.

Both take rows of ``benchmark_model.py``, as ``read_rows`` returns them, and return None where there is nothing to draw.
"""

import textwrap
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.config import MODES
from cs336_systems.experiments.model import CEILING, SETTINGS
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, lines, panels
from cs336_systems.report.tables import settings_split

_SHARES = {
    "mfu": "MFU: % of the dtype's datasheet peak\n(model FLOPs, causal)",
    "matmul_ceiling_share": "% of the measured matmul ceiling\n(model FLOPs, causal)",
}
_MOST_PANELS = 3
_NAMED = ["gpu", *(name for name in SETTINGS if name not in ("device", "warmup", "steps"))]
"""Settings that titles and legends name."""


def _measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each cell in the largest mode."""
    rows = rows[rows["variant"] != CEILING]
    rows = rows[rows["mode"] == max(rows["mode"].unique(), key=MODES.index)] if len(rows) else rows
    return newest(rows, ["gpu", *SETTINGS])


def step_figure(rows: pd.DataFrame) -> Figure | None:
    """Time of the whole pass (left) and share of the limit (right) against context length, or against model size if
    only one length was measured.

    Of rows in several modes the largest is drawn. Colour is the model, or the setting where the sizes are the axis;
    markers and dashes are the settings that differ.
    """
    rows = _measured(rows)
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return None
    x = "context_length" if rows["context_length"].nunique() > 1 else "size"
    caption, varying = settings_split(rows, _NAMED, ())
    differing = [name for name in varying if name not in (x, "size")]
    rows = rows.assign(how=rows[differing].astype(str).agg(", ".join, axis=1) if differing else rows["dtype"])
    share = next((metric for metric in _SHARES if (rows["metric"] == metric).any()), "")
    rows = rows[rows["metric"].isin(("step", share))]
    looks: dict[str, str] = {"colour": "how", "log": "y"}
    if x == "context_length":
        rows, looks = rows.sort_values(x, kind="stable"), {"colour": "size", "style": "how", "log": "xy"}
    figure, axes = lines(rows, x=x, panel="metric", spread=True, width=4.4, height=3.6, **looks)  # type: ignore[arg-type]
    axes["step"].set_ylabel("time of the whole pass, ms\n(median, bar p10 to p90)")
    if share:
        axes[share].set_yscale("linear")
        axes[share].set_ylim(bottom=0)
        axes[share].set_ylabel(_SHARES[share])
    figure.supxlabel("context length, tokens" if x == "context_length" else "model size", fontsize=10)
    figure.suptitle(caption, fontsize=9)
    return figure


def frontier_figure(rows: pd.DataFrame) -> Figure | None:
    """Peak GiB against ms of the whole pass, a named point for every policy of checkpointing that ran; an open marker
    is the predicted peak.

    A panel for each of the three models and settings with the most policies, in the largest mode.
    """
    rows = _measured(rows)
    settings = [name for name in _NAMED if name != "checkpoint"]
    groups = []
    for _, group in rows[rows["metric"] != ""].groupby(settings, sort=False, dropna=False):
        table = group.pivot_table(index="checkpoint", columns="metric", values="median", sort=False)
        points = table.reindex(columns=["step", "peak_memory", "predicted_peak_memory"])
        groups.append((group, points.dropna(subset=["step", "peak_memory"])))
    groups = sorted((pair for pair in groups if len(pair[1]) > 1), key=lambda pair: -len(pair[1]))[:_MOST_PANELS]
    if not groups:
        return None
    figure, shown = panels(len(groups), _MOST_PANELS, 6, 4.4)
    for axes, (group, points) in zip(shown, groups, strict=True):
        axes.plot(points["step"], points["peak_memory"], "o", color=OKABE_ITO[0], label="measured")
        axes.plot(points["step"], points["predicted_peak_memory"], "o", color="grey", mfc="white", label="predicted")
        for i, (policy, point) in enumerate(points.sort_values("step").iterrows()):
            place: dict[str, Any] = {"xytext": (-7, -3), "ha": "right"} if i % 2 else {"xytext": (7, -3)}
            at = point["step"], point["peak_memory"]
            axes.annotate(str(policy), at, textcoords="offset points", fontsize=8, **place)
        axes.set_ylim(0, 1.08 * points[["peak_memory", "predicted_peak_memory"]].max().max())
        axes.margins(x=0.2)
        axes.set_xlabel("time of the whole pass, ms (median)")
        axes.set_ylabel("peak memory, GiB")
        axes.set_title(textwrap.fill(settings_split(group, settings, ())[0], 80), fontsize=8)
    shown[0].legend(frameon=False, fontsize=9)
    return figure
