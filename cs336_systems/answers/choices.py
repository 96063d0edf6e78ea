"""The setting that ``train.py`` chooses for a GPU, compared with those measured there by hand (rows of ``choice``)."""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cs336_systems.experiments.training import TRAINING_TABLE
from cs336_systems.hardware import find_hardware
from cs336_systems.pretraining.card_plan import CardPlan, Way
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.plan_options import Asked
from cs336_systems.report.results import MISSING, Line
from cs336_systems.report.tables import Table

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS = ("batch_size", "context_length", "total_batch_tokens")
_WORDS = ("device", "dtype", "size", "keep", "attention", "kernels")
"""Options of train.py in which the runs differ, or that the plan needs."""
_HOST_GIB = 120.0
"""Host memory in GiB that plans may use: the hosts of these rows had 128."""


def _tried(rows: "pd.DataFrame") -> dict[tuple[str, str], list[tuple[Line, Way, bool]]]:
    """Return by (GPU, size) its settings: the measurement, the prediction, and whether train.py would choose it."""
    found = defaultdict(list)
    for line in TRAINING_TABLE.lines(rows):
        how, hardware = line.settings, find_hardware(line.settings["gpu"])
        assert hardware is not None
        asked: dict[str, Any] = {name: int(how[name]) for name in _NUMBERS} | {name: how[name] for name in _WORDS}
        asked["offload"] = () if how["offload"] == "none" else tuple(how["offload"].split("-"))
        options = replace(TrainOptions.default("cuda"), **asked)
        plan = CardPlan.of(options, Asked(gpu=hardware.name, host_gib=_HOST_GIB))
        way = plan.as_asked
        assert way is not None
        found[hardware.name, how["size"]].append((line, way, str(plan.chosen) == str(way)))
    return found


def _rate(line: Line) -> float:
    """Return the measured tokens/s; 0 for a run that failed."""
    return line.median("tokens_per_s") or 0.0


def choice_table(rows: "pd.DataFrame") -> Table:
    """Return a table of each setting's tokens/s, measured and predicted, and its share of the GPU's fastest."""
    lines = []
    for where, settings in _tried(rows).items():
        best = max(_rate(line) for line, _, _ in settings)
        for line, way, chosen in settings:
            rate, peak, status = _rate(line), line.median("peak_memory") or 0.0, line.last["status"]
            measured = [f"{rate:,.0f}", f"{100 * rate / best:.1f}", f"{peak:.1f}"]
            if not rate:
                measured = [{"oom": "out of memory"}.get(status, status), MISSING, MISSING]
            lines.append((*where, str(way), *measured, f"{way.tokens_per_s:,.0f}", "yes" if chosen else ""))
    columns = ("card", "size", "options", "tokens/s", "of the fastest %", "peak GiB", "predicted", "chosen")
    return Table.of("Settings by hand, and the one that train.py chooses; predicted by present rates", columns, lines)


def chosen_is_fastest(rows: "pd.DataFrame") -> tuple[int, int]:
    """Return for how many (GPU, size) pairs the chosen setting was the fastest measured, and how many there are."""
    tried = _tried(rows).values()
    fastest = (max(settings, key=lambda each: _rate(each[0])) for settings in tried)
    return sum(chosen for _, _, chosen in fastest), len(tried)
