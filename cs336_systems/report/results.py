"""Tables of results, declared by their columns; each cell of a benchmark's rows is one line.

    ResultTable(
        settings=("gpu", "size", "dtype"),
        columns=(
            Column("step ms", "step", spread=True),
            Column("tokens/s", "tokens_per_s", ",.0f"),
            Column("/ FSDP2", lambda line: line.repeats_over("step", line.peer(fsdp="torch")), ".3f"),
        ),
    ).of(rows)

A line shows the newest run of its cell (``harness/runs.py``). If the lines come from several commands or days, each has
its date.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cs336_systems.report.tables import LABELS, Table, digits, settings_split

if TYPE_CHECKING:
    import pandas as pd

MISSING = "–"

MAIN, SETTING = -1, 0
"""Ranks of the columns that a narrow terminal drops last: the main result; settings that distinguish lines."""

COMMAND = ("argv", "commit", "host")
"""Columns that identify the rows of one command; ratios are taken within one command."""


@dataclass(frozen=True)
class Spread:
    """A number with the least and the largest that it stands for."""

    median: float
    least: float
    largest: float


@dataclass(frozen=True)
class Line:
    """One cell.

    Attributes:
        settings: the settings that distinguish it from other cells, as shown.
        rows: all of its rows.
        run: the rows of its newest run.
        metrics: the run's pooled rows by metric; empty for a cell that failed.
        last: the last row of the run.
        lines: all lines of the table, by the values of their settings.
    """

    settings: dict[str, Any]
    rows: pd.DataFrame
    run: pd.DataFrame
    metrics: dict[str, pd.Series]
    last: pd.Series
    lines: Mapping[tuple, Line]

    def median(self, metric: str) -> float | None:
        """The median of a metric, None if it was not measured."""
        return float(self.metrics[metric]["median"]) if metric in self.metrics else None

    def largest(self, prefix: str) -> float | None:
        """The largest median of the metrics whose names begin with ``prefix``, None if there are none."""
        found = [float(row["median"]) for name, row in self.metrics.items() if name.startswith(prefix)]
        return max(found, default=None)

    def peer(self, **settings: object) -> Line | None:
        """Return the line that differs from this one only in these settings, or None."""
        return self.lines.get(tuple((self.settings | settings).values()))

    def run_beside(self, line: Line, columns: Collection[str]) -> pd.DataFrame:
        """Return rows of the cell's newest run that equals another line's run in these columns; empty if none does."""
        from cs336_systems.harness.runs import newest_run

        names = [name for name in columns if name in line.last]
        rows = self.rows[(self.rows[names] == line.last[names]).all(axis=1)]
        return newest_run(rows) if len(rows) else rows

    def over(self, metric: str, peer: Line | None) -> float | None:
        """Return the ratio of a metric's median to the peer's, or None if one of the two lacks it."""
        own, other = self.median(metric), peer.median(metric) if peer else None
        return None if own is None or not other else own / other

    def repeats_over(self, metric: str, peer: Line | None, alike: Collection[str] = COMMAND) -> Spread | None:
        """Return the metric's ratio to the peer's, per repeat, or None if no one command measured both.

        The peer's own line may show a newer command. For a metric that does not depend on when it was measured, such as
        a loss, ``alike`` can name fewer columns that must agree.
        """
        from cs336_systems.harness.runs import by_repeat

        if peer is None or metric not in self.metrics:
            return None
        run = peer.run_beside(self, alike)
        if metric not in set(run["metric"]):
            return None
        ratios = (by_repeat(self.run, metric) / by_repeat(run, metric)).dropna()
        return Spread(ratios.median(), ratios.min(), ratios.max()) if len(ratios) else None

    @property
    def status(self) -> str:
        """``ok``, or the kind of failure and its message."""
        return "ok" if self.last["status"] == "ok" else f"{self.last['status']}: {self.last['message']}"


@dataclass(frozen=True)
class Column:
    """One result.

    Attributes:
        value: a metric, or a function of the line. Text that it returns is shown unchanged, None as a dash, and a
            spread with its ends if they differ.
        form: format of the number; by default three significant digits.
        little: show nonzero numbers that ``form`` rounds to zero with three significant digits.
        spread: whether p10 and p90 follow the median, if there is more than one sample.
        rank: how soon a narrow terminal drops it (``Table.ranks``).
        note: explains the header below the table.
        optional: whether the column is left out if no line has a value.
    """

    header: str
    value: str | Callable[[Line], float | str | Spread | None]
    form: str = ""
    spread: bool = False
    rank: int = 1
    note: str = ""
    optional: bool = False
    little: bool = False

    def show(self, line: Line) -> str:
        found = line.median(self.value) if isinstance(self.value, str) else self.value(line)
        if found is None or isinstance(found, str):
            return found or MISSING
        if isinstance(found, Spread):
            shown, *ends = map(self._number, (found.median, found.least, found.largest))
            return f"{shown} ({'–'.join(ends)})" if ends != [shown, shown] else shown
        if found != found:
            return MISSING
        text = self._number(found)
        if self.spread and isinstance(self.value, str) and (row := line.metrics[self.value])["n"] > 1:
            text += f" ({self._number(row['p10'])}–{self._number(row['p90'])})"
        return text

    def _number(self, value: float) -> str:
        text = format(value, self.form) if self.form else digits(value)
        vanished = value and math.isfinite(value) and not any(digit in text for digit in "123456789")
        return digits(value) if self.little and vanished else text


@dataclass(frozen=True)
class ResultTable:
    """A table of cells.

    Attributes:
        settings: columns of the rows that distinguish cells; rows may lack some. Settings that all lines share move to
            the caption.
        always: settings that remain columns even if all lines share them.
        labels: headers of settings, where they differ from the column's name.
    """

    settings: tuple[str, ...]
    columns: tuple[Column, ...]
    always: Collection[str] = ("size",)
    labels: Mapping[str, str] = field(default_factory=dict)

    def of(self, rows: pd.DataFrame) -> Table:
        """Return a table with a line per cell, in order of first appearance; the last column is the status."""
        import pandas as pd

        lines = self.lines(rows)
        settings = list(lines[0].settings) if lines else [name for name in self.settings if name in rows]
        labels = LABELS | dict(self.labels)
        frame = pd.DataFrame([line.settings for line in lines], columns=settings)
        caption, varying = settings_split(frame, settings, self.always, labels)
        shown = {column: [column.show(line) for line in lines] for column in self.columns}
        shown = {c: cells for c, cells in shown.items() if not c.optional or any(cell != MISSING for cell in cells)}
        frame = frame[varying].rename(columns=labels)
        ranks = dict.fromkeys(frame.columns, SETTING) | {"warmup": 1, "steps": 1}
        ranks["status"] = 1 if all(line.status == "ok" for line in lines) else MAIN
        ranks |= {column.header: column.rank for column in shown}
        frame = frame.assign(**{column.header: cells for column, cells in shown.items()})
        if dates := _dates(lines):
            frame["date"] = dates
        frame["status"] = [line.status for line in lines]
        return Table(caption, frame, {column.header: column.note for column in shown if column.note}, ranks)

    def lines(self, rows: pd.DataFrame) -> list[Line]:
        from cs336_systems.harness.runs import newest_run, pooled

        settings = [name for name in self.settings if name in rows.columns]
        rows = rows.assign(**{name: rows[name].map(_plain) for name in settings})
        lines: dict[tuple, Line] = {}
        for key, cell in rows.groupby(settings, sort=False, dropna=False):
            run = newest_run(cell)
            metrics = {row["metric"]: row for _, row in pooled(run).iterrows() if row["metric"]}
            lines[key] = Line(dict(zip(settings, key, strict=True)), cell, run, metrics, run.iloc[-1], lines)
        return list(lines.values())


def _plain(value: object) -> object:
    """Return a setting as it is shown: 25 for 25.0, nothing for NaN."""
    try:
        number = float(value) if isinstance(value, float | str) else None
    except ValueError:
        return value
    if number is None:
        return value
    return "" if number != number else str(int(number)) if number.is_integer() else f"{number:g}"


def _dates(lines: list[Line]) -> list[str]:
    """Return when each line's command began to write its lines, in UTC; empty for one command on one day."""
    if not all({"argv", "commit", "timestamp"} <= set(line.last.index) for line in lines):
        return []
    commands = [(line.last["argv"], line.last["commit"], line.last["timestamp"][:10]) for line in lines]
    if len({command for command in commands if command[0]}) < 2:  # a killed process leaves no argv
        return []
    begun: dict[tuple, str] = {}
    for command, line in zip(commands, lines, strict=True):
        begun[command] = min(begun.get(command, "9"), line.run["timestamp"].min())
    return [begun[command][:16].replace("T", " ") for command in commands]
