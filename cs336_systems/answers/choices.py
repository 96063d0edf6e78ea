"""The setting that ``train.py`` chooses for a card, beside those that were tried there by hand (rows of ``choice``)."""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cs336_systems.experiments.training import TRAINING_TABLE
from cs336_systems.hardware import find_hardware
from cs336_systems.pretraining.card_plan import Asked, CardPlan, Way
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.report.tables import Table

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS = ("batch_size", "context_length", "total_batch_tokens")
_WORDS = ("device", "dtype", "size", "keep", "attention", "kernels")
"""Options of train.py in which runs differ, or that the plan asks about."""


class Tried(NamedTuple):
    """A setting as it was predicted and as it was measured.

    Attributes:
        tokens_per_s, peak_gib: of the run; both 0 if it failed.
        status: of the run, as rows have it: ok, oom or another failure.
        chosen: whether train.py would choose it on this card.
    """

    way: Way
    tokens_per_s: float
    peak_gib: float
    status: str
    chosen: bool


def _tried(rows: "pd.DataFrame") -> dict[tuple[str, str], list[Tried]]:
    """The settings of each card and size."""
    found = defaultdict(list)
    for line in TRAINING_TABLE.lines(rows):
        how, hardware = line.settings, find_hardware(line.settings["gpu"])
        assert hardware is not None
        asked: dict[str, Any] = {name: int(how[name]) for name in _NUMBERS} | {name: how[name] for name in _WORDS}
        plan = CardPlan.of(replace(TrainOptions.default("cuda"), **asked), Asked(gpu=hardware.name))
        way, rate, peak = plan.as_asked, line.median("tokens_per_s"), line.median("peak_memory")
        assert way is not None
        tried = Tried(way, rate or 0.0, peak or 0.0, line.last["status"], str(plan.chosen) == str(way))
        found[hardware.name, how["size"]].append(tried)
    return dict(found)


def choice_table(rows: "pd.DataFrame") -> Table:
    """Tokens/s of each setting, measured and predicted, and its share of the fastest one's on that card."""
    lines = []
    for where, settings in _tried(rows).items():
        best = max(each.tokens_per_s for each in settings)
        for each in settings:
            measured = [f"{each.tokens_per_s:,.0f}", f"{100 * each.tokens_per_s / best:.1f}", f"{each.peak_gib:.1f}"]
            if not each.tokens_per_s:
                measured = [{"oom": "out of memory"}.get(each.status, each.status), "–", "–"]
            predicted = f"{each.way.tokens_per_s:,.0f}"
            lines.append((*where, str(each.way), *measured, predicted, "yes" if each.chosen else ""))
    columns = ("card", "size", "options", "tokens/s", "of the fastest %", "peak GiB", "predicted", "chosen")
    return Table.of("Settings by hand, and the one that train.py chooses", columns, lines)


def chosen_is_fastest(rows: "pd.DataFrame") -> tuple[int, int]:
    """How many of the cards and sizes chose the fastest of their settings, of how many."""
    tried = _tried(rows).values()
    fastest = sum(max(settings, key=lambda each: each.tokens_per_s).chosen for settings in tried)
    return fastest, len(tried)
