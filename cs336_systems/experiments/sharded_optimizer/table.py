"""Sharded optimizer state in two tables and a figure: time against data parallelism, memory against its prediction.

The figure stacks what a rank's memory is taken by, one bar for each way to hold the state, a panel for each moment of a
step; a line across a bar is what parameters, gradients and state were predicted to take.
"""

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cs336_systems.case import RECIPE
from cs336_systems.experiments.sharded_optimizer.measure import CATEGORIES, MOMENTS
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

_SETTINGS = (
    *("gpu", "device", "world_size", "size", "batch_size", "context_length", "dtype", "attention", "compile"),
    *("checkpoint", "optimizer", "accumulate", "kernels", "keep", *RECIPE, "bucket_size_mb", "warmup", "steps"),
    "sharding",
)
_COLOURS = dict(zip(CATEGORIES, OKABE_ITO, strict=False))
_MOST_PANEL_ROWS = 3


def _state_error(line: Line) -> float | None:
    state, predicted = line.median("after_step_optimizer_state"), line.median("predicted_optimizer_state")
    return 100 * (state / predicted - 1) if state and predicted else None


TIMES = ResultTable(
    settings=_SETTINGS,
    always=("size", "sharding"),
    labels={"world_size": "ranks", "bucket_size_mb": "bucket MiB", "sharding": "how"},
    columns=(
        Column("forward ms", "forward", optional=True, rank=2),
        Column("backward ms", "backward", optional=True, spread=True, rank=2),
        Column("optimizer ms", "optimizer", optional=True, spread=True),
        Column("total ms", "step", optional=True, spread=True, rank=MAIN),
        Column(
            "ratio to replicated",
            lambda line: line.repeats_over("step", line.peer(sharding="replicated")),
            ".3f",
            rank=0,
            optional=True,
            note="of the median step, by repeat",
        ),
        Column(
            "GiB per link",
            "predicted_link_traffic",
            optional=True,
            rank=2,
            note="computed, of a ring; broadcasts in full, as they run one after another",
        ),
    ),
)
"""One line per cell of ``benchmark_sharded_optimizer.py``: its phases, the step as a ratio, bytes on the links."""

MEMORY = replace(
    TIMES,
    columns=(
        Column("parameters GiB", "before_step_parameters", optional=True, rank=2),
        Column("gradients GiB", "before_step_gradients", optional=True, rank=2),
        Column("state GiB", "after_step_optimizer_state", optional=True, rank=MAIN),
        Column("predicted state GiB", "predicted_optimizer_state", optional=True),
        Column("error %", _state_error, "+.2f", optional=True, rank=0, note="of the state, over its prediction"),
        Column("activations GiB", "after_forward_activations", optional=True, rank=2),
        *(Column(f"{m.replace('_', ' ')} GiB", f"{m}_allocated", optional=True, rank=3) for m in MOMENTS),
        Column("peak GiB", "before_step_peak", optional=True),
    ),
)
"""One line per cell: GiB of the fullest rank by category, the state's prediction, and the whole at each moment."""


def memory_figure(rows: pd.DataFrame) -> Figure | None:
    """Stacked bars of GiB: a row of panels for each of the last three models and settings, a panel for each moment."""
    case = [name for name in _SETTINGS if name not in ("warmup", "steps", "sharding")]
    rows = newest(rows, [*case, "sharding"])
    rows = rows[rows["status"] == "ok"]
    groups = [group for _, group in rows.groupby(case, sort=False, dropna=False)][-_MOST_PANEL_ROWS:]
    if not groups:
        return None
    height = max(3.0, 0.45 * rows["sharding"].nunique() + 1.4) * len(groups)
    figure = Figure(figsize=(13, height), layout="constrained")
    subfigures = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for subfigure, group in zip(subfigures, groups, strict=True):
        table = group.pivot_table(index="sharding", columns="metric", values="median", sort=False)
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
    return figure


def _predicted(table: pd.DataFrame, moment: str) -> pd.Series:
    """What should be there at a moment of the second step, in GiB: gradients from backward on, state after a step."""
    names = ["parameters"]
    if moment in ("before_step", "after_step"):
        names.append("gradients")
    if moment != "initialised":
        names.append("optimizer_state")
    return table[[f"predicted_{name}" for name in names]].sum(axis=1)
