"""The one declarative table of results: what its columns are; a line for each cell of the rows of a benchmark.

    ResultTable(
        settings=("gpu", "size", "dtype"),
        columns=(
            Column("step ms", "step", spread=True),
            Column("tokens/s", "tokens_per_s", ",.0f"),
            Column("/ FSDP2", lambda line: line.repeats_over("step", line.peer(fsdp="torch")), ".3f"),
        ),
    ).of(rows)

What is shown of a cell is its newest run (``harness/runs.py``). Where the lines come from several commands, or from
several days, each carries its date.
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
        settings: what tells it from others, as shown.
        rows: all of its rows.
        run: those of its newest run.
        metrics: these rows pooled, by metric; none for a cell that failed.
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
        """The line that differs from this one in these settings alone."""
        return self.lines.get(tuple((self.settings | settings).values()))

    def run_beside(self, line: Line, columns: Collection[str]) -> pd.DataFrame:
        """The newest of this cell's runs that agrees with the run of another line in the columns; empty without one."""
        from cs336_systems.harness.runs import newest_run

        names = [name for name in columns if name in line.last]
        rows = self.rows[(self.rows[names] == line.last[names]).all(axis=1)]
        return newest_run(rows) if len(rows) else rows

    def over(self, metric: str, peer: Line | None) -> float | None:
        """A metric over the peer's, None if one of the two lacks it."""
        own, other = self.median(metric), peer.median(metric) if peer else None
        return None if own is None or not other else own / other

    def repeats_over(self, metric: str, peer: Line | None, alike: Collection[str] = COMMAND) -> Spread | None:
        """The metric's ratio to the peer's in the same command, per repeat; None if that command has not measured both.

        The peer's own line may show a newer command. A metric that does not depend on when it was measured, such as a
        loss, is compared if ``alike``, fewer columns, agree.
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
        """ok, or how it failed and why."""
        return "ok" if self.last["status"] == "ok" else f"{self.last['status']}: {self.last['message']}"


@dataclass(frozen=True)
class Column:
    """One result.

    Attributes:
        value: a metric, or a function of the line; text that it returns is shown as it is, None as a dash, a spread
            with its ends where they are not the same.
        form: of the number, three digits unless said.
        little: what ``form`` would show as zero has three digits.
        spread: whether p10 and p90 stand behind the median; one sample has none.
        rank: how soon a narrow terminal drops it (``Table.ranks``).
        note: what the header cannot say.
        optional: left out of a table in which no line has a value.
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
        settings: columns of the rows that tell one cell from another; rows may lack some. Those that all lines share
            stand in the caption.
        always: settings that are columns of the table even then.
        labels: headers of settings, where they are not the name of the column.
    """

    settings: tuple[str, ...]
    columns: tuple[Column, ...]
    always: Collection[str] = ("size",)
    labels: Mapping[str, str] = field(default_factory=dict)

    def of(self, rows: pd.DataFrame) -> Table:
        """One line per cell, in the order in which the cells first appear; the last column is the status."""
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
    """A setting as it is shown: 25 for 25.0, nothing where it does not apply."""
    try:
        number = float(value) if isinstance(value, float | str) else None
    except ValueError:
        return value
    if number is None:
        return value
    return "" if number != number else str(int(number)) if number.is_integer() else f"{number:g}"


def _dates(lines: list[Line]) -> list[str]:
    """When each line's command began to write the lines, in UTC; nothing if one command wrote them all on one day."""
    if not all({"argv", "commit", "timestamp"} <= set(line.last.index) for line in lines):
        return []
    commands = [(line.last["argv"], line.last["commit"], line.last["timestamp"][:10]) for line in lines]
    if len({command for command in commands if command[0]}) < 2:  # a killed process leaves no argv
        return []
    begun: dict[tuple, str] = {}
    for command, line in zip(commands, lines, strict=True):
        begun[command] = min(begun.get(command, "9"), line.run["timestamp"].min())
    return [begun[command][:16].replace("T", " ") for command in commands]
