"""Committed rows and digests, by part: read once, and missing ones reported.

    committed = Committed(Path("profiles"), "h200")
    committed.rows("grid", size="xl", mode="step")     # results/h200/grid/*.csv, or .csv.gz
    committed.rows("nsys")                             # digests/h200/nsys/profile_model.csv
    committed.digests("nsys", "kernels")               # of every digest of a part, one below the other
    committed.run("first")                             # runs/h200/first/log.jsonl
    committed.gpu_tests()                              # gpu_tests.csv

What these return are questions: nothing is read until the frame or a number is asked for. A part that is missing, or
holds no such row, then raises ``NotMeasured``.
"""

import csv
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.answers.evidence import RUNS, TEST_RUNS
from cs336_systems.config import MODEL_SIZES
from cs336_systems.harness.record import read_rows
from cs336_systems.harness.runs import RATES, newest_run, pooled
from cs336_systems.pretraining.run_log import LOG, Run, read_run

_EFFORT = ("warmup", "steps", "repeat", "calls", "recorded_steps")
"""Columns of a cell that do not tell what was measured, only how often."""

_DIGEST = ["profiler", "size", "batch_size", "context_length", "dtype"]


class NotMeasured(LookupError):
    """Rows or digests that a document asks for are not committed."""


@dataclass(frozen=True)
class Rows:
    """Rows of one part, or of several below each other, whose settings are as asked for."""

    read: Callable[[], pd.DataFrame]
    settings: tuple[tuple[str, Any], ...] = ()
    order: tuple[str, ...] = ()

    def where(self, **settings: Any) -> "Rows":
        """Those whose columns hold the values, of a list any; a later value of a column replaces an earlier one."""
        named = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        return replace(self, settings=tuple((dict(self.settings) | named).items()))

    def by(self, *columns: str) -> "Rows":
        """The same in the order of columns: sizes from small to large, numbers by value, equal ones as measured."""
        return replace(self, order=columns)

    def asked(self, *order: str) -> "Asked":
        """A function for one number, ``ddp("step", "naive")``: the metric, then the values of ``order``."""
        return Asked(self, order)

    def frame(self) -> pd.DataFrame:
        """The rows themselves.

        Raises:
            NotMeasured: there are none.
            ValueError: a setting that is no column.
        """
        return _selected(self.read, self.settings, self.order)

    def number(self, metric: str, statistic: str = "median") -> float:
        """One metric of one cell, by the rule of ``harness/runs.py``; `a + b` is the sum of two metrics.

        Args:
            metric: as rows call it.
            statistic: a column of rows, or ``first`` or ``rest``: the first sample, or the mean of all others.

        Raises:
            NotMeasured: there is no such row.
            ValueError: the part knows no such metric, or the rows are of several cells.
        """
        if " + " in metric:
            return sum(self.number(part, statistic) for part in metric.split(" + "))
        if not (self.read()["metric"] == metric).any():
            raise ValueError(f"no row holds the metric {metric!r}")
        cell = self.where(metric=[metric, *filter(None, [RATES.get(metric)])]).frame()
        rows = cell[cell["metric"] == metric]
        if rows.empty:
            raise NotMeasured(f"no row holds {metric}")
        if len(rows) == 1 and metric not in RATES and statistic in rows:
            return float(rows[statistic].iloc[0])  # nothing to pool, in nearly every call
        columns = list(rows.columns)
        of_cell = columns[columns.index("variant") + 1 : columns.index("status")]
        if several := [name for name in of_cell if name not in _EFFORT and rows[name].nunique() > 1]:
            raise ValueError(f"{metric} of several cells, which differ in {', '.join(several)}")
        if statistic in ("first", "rest"):
            samples = rows["samples"].iloc[-1]
            return float(samples[0] if statistic == "first" else np.mean(samples[1:]))
        return float(pooled(newest_run(cell)).set_index("metric")[statistic][metric])

    def values(self, *metrics: str, statistic: str = "median") -> list[float]:
        """A statistic of every row of some metrics; ``deviation`` is std over mean, ``first`` the first sample."""
        rows = self.frame()
        rows = rows[rows["metric"].isin(metrics)]
        if statistic == "deviation":
            return list(rows["std"] / rows["mean"])
        return [samples[0] for samples in rows["samples"]] if statistic == "first" else list(rows[statistic])

    def mean(self, column: str) -> float:
        """The mean of a column of a recording's CSV; as ``sum`` and ``most``, it raises NotMeasured without a line."""
        return float(self.frame()[column].mean())

    def sum(self, column: str) -> float:
        return float(self.frame()[column].sum())

    def most(self, column: str) -> dict[str, Any]:
        """The line with the most in a column, by its columns."""
        line = self.frame().sort_values(column, kind="stable").iloc[-1]
        return {str(name): value for name, value in line.items()}


@dataclass(frozen=True)
class Asked:
    """A metric of one cell of rows; settings that are not said are as in the rows."""

    rows: Rows
    order: tuple[str, ...]

    def __call__(self, metric: str, *values: object, statistic: str = "median", **settings: object) -> float:
        said = dict(zip(self.order, values, strict=False))
        if len(values) > len(self.order) or said.keys() & settings.keys():
            raise TypeError(f"{metric!r} takes {', '.join(self.order)}, and other settings by name")
        return self.rows.where(**said | settings).number(metric, statistic)


@functools.cache
def _selected(
    read: Callable[[], pd.DataFrame], settings: tuple[tuple[str, Any], ...], order: tuple[str, ...]
) -> pd.DataFrame:
    """Rows that hold the settings, in an order; remembered, as pages ask for the same ones again."""
    rows = read()
    held = np.full(len(rows), True)
    for name, value in settings:
        if name not in rows:
            raise ValueError(f"no column is called {name!r}")
        held &= _holds(rows[name], value).to_numpy()
    rows = rows[held] if settings else rows  # once, as it copies all columns
    if rows.empty:
        raise NotMeasured(f"no row has {', '.join(f'{name} {value}' for name, value in settings)}")
    if order:
        rows = rows.sort_values(list(order), key=_places, kind="stable")
    return rows


def _holds(column: pd.Series, value: Any) -> pd.Series:
    if isinstance(value, tuple):
        return functools.reduce(operator.or_, (_holds(column, each) for each in value))
    return column.astype(str) == value if isinstance(value, str) else pd.to_numeric(column, errors="coerce") == value


def _places(column: pd.Series) -> pd.Series:
    if column.name == "size":
        return column.map({name: place for place, name in enumerate(MODEL_SIZES)})
    numbers = pd.to_numeric(column, errors="coerce")
    return column if numbers.isna().any() else numbers


class Committed:
    """Rows, recordings and runs in ``profiles/``, of one machine unless another is named, each named after its GPU."""

    def __init__(self, profiles: Path, machine: str) -> None:
        self._profiles, self._machine = profiles, machine
        self._read: dict[Path, pd.DataFrame] = {}
        self._readers: dict[tuple[str, ...], Callable[[], pd.DataFrame]] = {}

    def rows(self, *parts: str, machine: str = "", **settings: Any) -> Rows:
        """Rows of parts of the measuring recipes; ``part/file`` where a part has several files."""
        return Rows(self._reader(parts, machine or self._machine)).where(**settings)

    def _reader(self, parts: tuple[str, ...], machine: str) -> Callable[[], pd.DataFrame]:
        """A function that reads parts, the same for the same ones."""

        def read() -> pd.DataFrame:
            tables = [self.table(self._file(part, machine)) for part in parts]
            return tables[0] if len(tables) == 1 else pd.concat(tables)

        return self._readers.setdefault((machine, *parts), read)

    def digests(self, part: str, what: str) -> Rows:
        """``what`` (kernels, ranges, allocations: its CSVs) of every digest, with its cell's columns."""
        return Rows(functools.cache(lambda: self._digests(part, what)))

    def recorded(self, name: str, **settings: Any) -> Rows:
        """The lines of a CSV below ``digests/``, by its path without the ending."""
        path = self._profiles / "digests" / f"{name}.csv"
        return Rows(functools.cache(lambda: pd.read_csv(path))).where(**settings)

    def run(self, name: str) -> Run:
        """A training run.

        Raises:
            NotMeasured: its log is not committed.
        """
        path = self._profiles / RUNS / self._machine / name / LOG
        if not path.exists():
            raise NotMeasured(f"`{path.relative_to(self._profiles)}` is missing")
        return read_run(path)

    def runs(self, *prefixes: str, machine: str) -> dict[str, Run]:
        """The committed runs of a machine whose names begin with one of the prefixes, by name."""
        logs = sorted((self._profiles / RUNS / machine).glob(f"*/{LOG}"))
        return {log.parent.name: read_run(log) for log in logs if log.parent.name.startswith(prefixes)}

    def gpu_tests(self, newest: int = 0) -> list[dict[str, str]]:
        """Runs of the tests that need a GPU, the newest ones or all: date, commit, tests and outcome."""
        with (self._profiles / TEST_RUNS).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))[-newest:]

    def _file(self, part: str, machine: str) -> Path:
        folder, _, name = part.partition("/")
        rows = (self._profiles / "results" / machine / folder).glob(f"{name or '*'}.csv*")
        found = [*rows, *(self._profiles / "digests" / machine / folder).glob("profile_model.csv")]
        if not found:
            raise NotMeasured(f"the rows of `results/{machine}/{part}` are missing")
        if len(found) > 1:
            raise ValueError(f"part {part!r} has several files, name one: {', '.join(sorted(p.name for p in found))}")
        return found[0]

    def table(self, path: Path) -> pd.DataFrame:
        """The rows of a file, read once."""
        if path not in self._read:
            rows = read_rows(path)
            words: list[str] = list(rows.select_dtypes("str"))
            in_one_block = rows.astype(dict.fromkeys(words, object)).copy()  # selections of it are copied quickly
            self._read[path] = in_one_block
        return self._read[path]

    def _digests(self, part: str, what: str) -> pd.DataFrame:
        rows = self.rows(part, status="ok").frame()
        folder = self._profiles / "digests" / self._machine / part
        found = []
        keys = [*_DIGEST, "mode"] if rows["profiler"].iloc[0] == "memory" else _DIGEST
        for line in rows[keys].drop_duplicates().to_dict("records"):
            cell = {str(name): value for name, value in line.items()}
            form = "{size}-b{batch_size}-c{context_length}-{dtype}"
            stem = (f"memory-{form}-{{mode}}" if "mode" in cell else f"{form}-{{profiler}}").format(**cell)
            path = folder / f"{stem}-{what}.csv"
            if not path.exists():
                raise NotMeasured(f"`{path.relative_to(self._profiles)}` is not committed")
            found.append(pd.read_csv(path).assign(**cell))
        return pd.concat(found)
