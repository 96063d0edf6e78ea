"""Rows and digests that are committed, by part: read once, their provenance checked, absence said aloud.

    committed = Committed(Path("profiles"), "h200")
    committed.rows("grid")                                # results/h200/grid/benchmark_model.csv, or .csv.gz
    committed.digest("nsys", "small-b4-c512-fp32-nsys-kernels.csv")
    committed.problems                                    # rows that do not say where they come from

A part without rows raises ``NotMeasured``, which ``visible`` turns into a sentence: a document shows a gap, and what
would fill it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems.harness.record import read_rows

PROVENANCE = ("commit", "argv", "timestamp", "torch")
"""What every row must say; besides the GPU, or the host of a row that a CPU measured."""

_UNKNOWN = ("", "unknown", "nan")


class NotMeasured(LookupError):
    """Rows or digests that a document asks for are not committed."""


class Committed:
    """What ``profiles/`` holds of one machine, which the name of its GPU stands for."""

    def __init__(self, profiles: Path, machine: str) -> None:
        self.results, self.digests = profiles / "results" / machine, profiles / "digests" / machine
        self.problems: list[str] = []
        self._profiles = profiles
        self._read: dict[Path, pd.DataFrame] = {}

    def beside(self, machine: str) -> "Committed":
        """What is committed of another machine; problems are gathered here."""
        other = Committed(self._profiles, machine)
        other.problems = self.problems
        return other

    def rows(self, part: str, benchmark: str = "benchmark_model") -> pd.DataFrame:
        """The rows of one part of the measuring recipes.

        Raises:
            NotMeasured: they are not committed.
            ValueError: the file holds no rows of this schema.
        """
        return self._table(self.results / part / f"{benchmark}.csv")

    def profile_rows(self, part: str) -> pd.DataFrame:
        """The rows that a part of the digests was recorded with; raises as ``rows``."""
        return self._table(self.digests / part / "profile_model.csv")

    def digest(self, part: str, name: str) -> Path:
        """A file of a digest; NotMeasured if it is not committed."""
        path = self.digests / part / name
        if not path.exists():
            raise NotMeasured(f"`{_below_profiles(path)}` is not committed")
        return path

    def _table(self, path: Path) -> pd.DataFrame:
        path = path if path.exists() else path.with_suffix(".csv.gz")
        if not path.exists():
            raise NotMeasured(f"the rows of `{_below_profiles(path.with_suffix('').with_suffix('.csv'))}` are missing")
        if path not in self._read:
            self._read[path] = read_rows(path)
            self.problems += [f"{_below_profiles(path)}, {problem}" for problem in missing_provenance(self._read[path])]
        return self._read[path]


def missing_provenance(rows: pd.DataFrame) -> list[str]:
    """One sentence for each column of provenance that some rows leave empty."""
    problems = []
    device = rows["device"] if "device" in rows else pd.Series("cuda", index=rows.index)
    columns = {name: rows[name] for name in PROVENANCE} | {
        "gpu": rows["gpu"].where(device != "cpu", "a CPU"),
        "host": rows["host"].where(device == "cpu", "a GPU"),
    }
    for name, values in columns.items():
        empty = values.astype(str).isin(_UNKNOWN)
        if empty.any():
            first = empty.to_numpy().argmax() + 2
            problems.append(f"line {first}: {empty.sum()} of {len(rows)} rows do not say their {name}")
    return problems


def cells(rows: pd.DataFrame, keys: list[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The rows of each cell beside the values that tell it from others, in the order measured."""
    for key, cell in rows.groupby(keys, sort=False, dropna=False):
        yield dict(zip(keys, key, strict=True)), cell


def visible(block: Callable[[], str]) -> Callable[[], str]:
    """The block, or in its place a sentence that says what is missing."""

    def rendered() -> str:
        try:
            return block()
        except NotMeasured as missing:
            return f"**Not measured yet:** {missing.args[0]}."

    return rendered


def _below_profiles(path: Path) -> str:
    """A path as documents name it."""
    parts = path.parts
    return "/".join(parts[max(i for i, part in enumerate(parts) if part in ("results", "digests")) - 1 :])
