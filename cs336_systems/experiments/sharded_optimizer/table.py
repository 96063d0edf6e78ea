"""Sharded optimizer state in two tables and a figure: time beside plain data parallelism, memory beside its prediction.

The figure stacks what a rank's memory is taken by, one bar for each way to hold the state, a panel for each moment of a
step; a line across a bar is what parameters, gradients and state were predicted to take.
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cs336_systems.experiments.sharded_optimizer.measure import CATEGORIES, MOMENTS
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.tables import Table, digits, settings_split

_SETTINGS = [
    "gpu",
    "device",
    "world_size",
    "size",
    "batch_size",
    "context_length",
    "dtype",
    "optimizer",
    "bucket_size_mb",
]
_COUNTS = ["warmup", "steps"]
_COLOURS = dict(zip(CATEGORIES, OKABE_ITO, strict=False))
_MOST_PANEL_ROWS = 3


def time_table(rows: pd.DataFrame) -> Table:
    """One line per cell: its phases, the step as a ratio to ``replicated`` of the same repeat, and bytes on the links.

    Args:
        rows: of ``benchmark_sharded_optimizer.py``; repeats are pooled by their medians.
    """
    ratios = _ratios(rows)
    lines = []
    for key, cell in rows.groupby([*_SETTINGS, *_COUNTS, "sharding"], sort=False, dropna=False):
        first = cell.iloc[0]
        medians = _medians(cell)
        ratio = ratios.get(tuple(key))
        lines.append(
            {column: first[column] for column in (*_SETTINGS, *_COUNTS)}
            | {"how": first["sharding"]}
            | {f"{phase} ms": _shown(medians, phase) for phase in ("forward", "backward", "optimizer")}
            | {"total ms": _shown(medians, "step"), "ratio to replicated": "–" if ratio is None else f"{ratio:.3f}"}
            | {"GiB per link": _shown(medians, "predicted_link_traffic"), "status": _status(first)}
        )
    return _table(lines)


def memory_table(rows: pd.DataFrame) -> Table:
    """One line per cell: GiB of the fullest rank by category, the state's prediction, and the whole at each moment."""
    lines = []
    for _, cell in rows.groupby([*_SETTINGS, *_COUNTS, "sharding"], sort=False, dropna=False):
        first = cell.iloc[0]
        medians = _medians(cell)
        state, predicted = medians.get("after_step_optimizer_state"), medians.get("predicted_optimizer_state")
        error = "–" if not state or not predicted else f"{100 * (state / predicted - 1):+.2f}"
        lines.append(
            {column: first[column] for column in (*_SETTINGS, *_COUNTS)}
            | {
                "how": first["sharding"],
                "parameters GiB": _shown(medians, "before_step_parameters"),
                "gradients GiB": _shown(medians, "before_step_gradients"),
                "state GiB": _shown(medians, "after_step_optimizer_state"),
                "predicted state GiB": _shown(medians, "predicted_optimizer_state"),
                "error %": error,
                "activations GiB": _shown(medians, "after_forward_activations"),
            }
            | {f"{moment.replace('_', ' ')} GiB": _shown(medians, f"{moment}_allocated") for moment in MOMENTS}
            | {"peak GiB": _shown(medians, "before_step_peak"), "status": _status(first)}
        )
    return _table(lines)


def _table(lines: list[dict[str, str]]) -> Table:
    frame = pd.DataFrame(lines)
    settings = [*_SETTINGS, *_COUNTS]
    caption, varying = settings_split(frame, settings)
    shown = [column for column in frame.columns if column not in settings]
    filled = [column for column in shown if column in ("how", "status") or (frame[column] != "–").any()]
    return Table(caption, frame[varying + filled].rename(columns={name: name.replace("_", " ") for name in varying}))


def _medians(cell: pd.DataFrame) -> dict[str, float]:
    """By metric, the median over repeats."""
    measured = cell[cell["metric"] != ""]
    return {str(name): float(group["median"].median()) for name, group in measured.groupby("metric")}


def _shown(medians: dict[str, float], metric: str) -> str:
    return digits(medians[metric]) if metric in medians else "–"


def _status(row: pd.Series) -> str:
    return row["status"] if row["status"] == "ok" else f"{row['status']}: {row['message']}"


def _ratios(rows: pd.DataFrame) -> dict[tuple, float]:
    """By cell, the median over repeats of its step over that of ``replicated`` in the same repeat."""
    steps = rows[rows["metric"] == "step"]
    found: dict[tuple, list[float]] = {}
    for key, repeat in steps.groupby([*_SETTINGS, *_COUNTS, "repeat"], sort=False, dropna=False):
        base = repeat[repeat["sharding"] == "replicated"]["median"]
        if base.empty:
            continue
        for _, row in repeat.iterrows():
            found.setdefault((*key[:-1], row["sharding"]), []).append(row["median"] / base.iloc[-1])
    return {key: float(pd.Series(ratios).median()) for key, ratios in found.items()}


def draw_memory(rows: pd.DataFrame, path: Path) -> bool:
    """Stacked bars of GiB, newest rows of each cell, as PNG; returns whether it drew.

    A row of panels for each model and setting, the last three of them; a panel for each moment.
    """
    rows = rows[(rows["status"] == "ok") & (rows["metric"] != "")]
    groups = [group for _, group in rows.groupby(_SETTINGS, sort=False, dropna=False)][-_MOST_PANEL_ROWS:]
    if not groups:
        return False
    height = max(3.0, 0.45 * rows["sharding"].nunique() + 1.4) * len(groups)
    figure = Figure(figsize=(13, height), layout="constrained")
    subfigures = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for subfigure, group in zip(subfigures, groups, strict=True):
        newest = group.drop_duplicates(["sharding", "metric"], keep="last")
        table = newest.pivot_table(index="sharding", columns="metric", values="median", sort=False)
        table = table.loc[group["sharding"].unique()[::-1]]  # bars are drawn from the bottom
        for i, (axes, moment) in enumerate(zip(subfigure.subplots(1, len(MOMENTS), sharex=True), MOMENTS, strict=True)):
            left = pd.Series(0.0, index=table.index)
            for category in CATEGORIES:
                width = table.get(f"{moment}_{category}", pd.Series(0.0, index=table.index)).fillna(0.0)
                axes.barh(table.index, width, left=left, color=_COLOURS[category], height=0.7)
                left = left + width
            predicted = _predicted(table, moment)
            places = range(len(table))
            axes.vlines(predicted, [p - 0.42 for p in places], [p + 0.42 for p in places], color="black", linewidth=1.5)
            axes.set_title(moment.replace("_", " "), fontsize=10)
            axes.set_xlabel("GiB")
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            if i:
                axes.set_yticklabels([])
        first = group.iloc[0]
        subfigure.suptitle(
            f"Memory of one rank of {first['world_size']}: {first['size']}, batch {first['batch_size']}, context "
            f"{first['context_length']}, {first['dtype']}, AdamW {first['optimizer']}, {first['gpu'] or first['host']}",
            fontsize=11,
        )
    drawn = [category for category in CATEGORIES if rows["metric"].str.endswith(f"_{category}").any()]
    handles = [Line2D([], [], color=_COLOURS[c], linewidth=8, label=c.replace("_", " ")) for c in drawn]
    handles.append(Line2D([], [], color="black", linewidth=1.5, label="predicted: parameters, gradients, state"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    return True


def _predicted(table: pd.DataFrame, moment: str) -> pd.Series:
    """What should be there at a moment of the second step, in GiB: gradients from backward on, state after a step."""
    names = ["parameters"]
    if moment in ("before_step", "after_step"):
        names.append("gradients")
    if moment != "initialised":
        names.append("optimizer_state")
    return table[[f"predicted_{name}" for name in names]].sum(axis=1)
