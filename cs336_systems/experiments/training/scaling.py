"""Whole runs on several ranks: how many times as fast as one rank of the same command they train."""

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.training.table import COMMAND, UNSHARDED
from cs336_systems.report.figures import OKABE_ITO, dress

APART = "ranks apart"
WAYS: dict[str, dict[str, object]] = {
    "ZeRO-1": {"zero": 1, "apart": "off"},
    "ZeRO-3, collectives": {"zero": 3, "gather_by": "collectives", "apart": "off"},
    "ZeRO-3, copies": {"zero": 3, "gather_by": "copies", "apart": "off"},
    APART: {"apart": "on"},
}
"""How ranks share a step, by the settings of a row; apart each trains by itself on its share of the tokens."""

_MARKERS = dict(zip(WAYS, (("o", OKABE_ITO[0]), ("s", OKABE_ITO[1]), ("D", OKABE_ITO[2]), ("|", "0.3")), strict=True))
_LEAST_DRAWN = 90
"""%, where the axis begins; what is less is written there as a number."""


def over_one_rank(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second over those of one rank: a line for each size, recipe, number of ranks and command, not only the
    newest, so that commands of several hosts stand below each other.

    Returns:
        ``size``, ``products`` (the recipe, bf16 where they are stored), ``ranks``, ``commit`` (its first seven digits)
        and a column for each of ``WAYS``, NaN where it was not measured; no line for a command without one rank.
    """
    rates = rows[(rows["status"] == "ok") & (rows["metric"] == "tokens_per_s")]
    lines = []
    for (size, recipe, *command), runs in rates.groupby(["size", "recipe", *COMMAND], sort=False):
        one = runs.loc[(runs["world_size"] == 1) & runs["zero"].isin(UNSHARDED), "median"]
        if one.empty:
            continue
        commit = str(dict(zip(COMMAND, command, strict=True))["commit"])[:7]
        products = "bf16" if recipe == "stored" else recipe
        for ranks, shared in runs[runs["world_size"] > 1].groupby("world_size"):
            ratios = {way: _rate(shared, settings) / one.iloc[0] for way, settings in WAYS.items()}
            lines.append({"size": size, "products": products, "ranks": ranks, "commit": commit} | ratios)
    lines.sort(key=lambda line: (list(MODEL_SIZES).index(line["size"]), line["products"], line["ranks"]))
    return pd.DataFrame(lines)


def _rate(runs: pd.DataFrame, settings: dict[str, object]) -> float:
    found = runs.loc[(runs[list(settings)] == list(settings.values())).all(axis=1), "median"]
    return found.iloc[0] if len(found) else float("nan")


def ranks_figure(rows: pd.DataFrame, goal: float) -> Figure | None:
    """The same as a share of the number of ranks, a line for each command and a mark for each way.

    Args:
        goal: %, drawn as a dashed line.
    """
    lines = over_one_rank(rows)
    if lines.empty:
        return None
    places = range(len(lines))
    figure = Figure(figsize=(8, 1.4 + 0.32 * len(lines)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(goal, color="0.6", linestyle="--", linewidth=1, label=f"goal: {goal:g} %")
    for way, (marker, colour) in _MARKERS.items():
        shares = 100 * lines[way] / lines["ranks"]
        axes.scatter(shares, places, marker=marker, color=colour, s=70 if way == APART else 32, label=way, zorder=3)
        for place, share in zip(places, shares, strict=True):
            if share < _LEAST_DRAWN:
                axes.annotate(f"← {share:.0f}", (_LEAST_DRAWN + 0.1, place), color=colour, va="center", fontsize=8)
    names = [f"{line.size}, {line.products}, {line.ranks} ranks ({line.commit})" for line in lines.itertuples()]
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(_LEAST_DRAWN, 101)
    axes.set_xlabel("tokens/s, % of the number of ranks times one rank in the same command", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    dress(axes)
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return figure
