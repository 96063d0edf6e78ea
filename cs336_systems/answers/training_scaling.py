"""Whole runs on several ranks: how many times as fast as one rank of the same command they train."""

import pandas as pd

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.training.table import COMMAND
from cs336_systems.report.results import MISSING
from cs336_systems.report.tables import Table

_APART = "ranks apart"
_WAYS: dict[str, dict[str, object]] = {
    "ZeRO-1": {"zero": 1, "apart": "off"},
    "ZeRO-3, collectives": {"zero": 3, "gather_by": "collectives", "apart": "off"},
    "ZeRO-3, copies": {"zero": 3, "gather_by": "copies", "apart": "off"},
    _APART: {"apart": "on"},
}


def scaling_table(rows: pd.DataFrame) -> Table:
    """A line for each size, recipe, number of ranks and command that has measured one rank, too, and not only the
    newest of a cell: commands of several hosts stand below each other.

    Raises:
        NotMeasured: no command has measured one rank and several.
    """
    rates = rows[(rows["status"] == "ok") & (rows["metric"] == "tokens_per_s")]
    lines = []
    for (size, recipe, *command), runs in rates.groupby(["size", "recipe", *COMMAND], sort=False):
        one = runs.loc[runs["world_size"] == 1, "median"]
        for ranks, shared in runs[runs["world_size"] > 1].groupby("world_size"):
            if len(one):
                named = {"size": size, "products": "bf16" if recipe == "stored" else recipe, "ranks": ranks}
                times = {way: _rate(shared, settings) / one.iloc[0] for way, settings in _WAYS.items()}
                commit = str(dict(zip(COMMAND, command, strict=True))["commit"])[:7]
                lines.append(named | times | {"ZeRO-1 over apart": times["ZeRO-1"] / times[_APART], "commit": commit})
    if not lines:
        raise NotMeasured("training on several ranks beside one")
    lines.sort(key=lambda line: (list(MODEL_SIZES).index(line["size"]), line["products"], line["ranks"]))
    frame = pd.DataFrame(lines)
    ratios = list(frame.columns[3:-1])
    frame[ratios] = frame[ratios].map(lambda ratio: MISSING if pd.isna(ratio) else f"{ratio:.3f}")
    return Table("Tokens/s over those of one rank in the same command.", frame)


def _rate(runs: pd.DataFrame, settings: dict[str, object]) -> float:
    found = runs.loc[(runs[list(settings)] == list(settings.values())).all(axis=1), "median"]
    return found.iloc[0] if len(found) else float("nan")
