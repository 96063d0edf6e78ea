"""Figures published by others: each with its source, and the day on which the source gave it.

``outside.csv`` holds them; documents quote them by name, ``{{ outside("class record") }}``, and show all in one table.
"""

import csv
import functools
from pathlib import Path

import pandas as pd

from cs336_systems.report.tables import Table

_PATH = Path(__file__).with_suffix(".csv")


@functools.cache
def _figures() -> dict[str, dict[str, str]]:
    with _PATH.open(newline="") as file:
        return {line.pop("name"): line for line in csv.DictReader(file)}


def outside(name: str) -> str:
    """A figure with its unit.

    Raises:
        LookupError: none has this name.
    """
    if name not in _figures():
        raise LookupError(f"outside.csv holds no {name!r}, only {', '.join(_figures())}")
    return _figures()[name]["figure"]


def outside_table() -> Table:
    """All of them."""
    return Table("As their sources gave them on the date.", pd.DataFrame(_figures().values()))


def given(text: str) -> str:
    """A number that was set, and not found: the size of a message, a limit; as it was typed."""
    return text
