"""Tables described in templates: a pivot of rows, and the part of a larger table that a page shows.

    {{ pivot(rows("context-512", mode="step"), ["size"], {
         "fp32 ms": {"metric": "step", "dtype": "fp32"}, "bf16 ms": {"metric": "step", "dtype": "bf16"},
         "ratio": {"ratio": ["fp32 ms", "bf16 ms"]} }) }}
    {{ shown("fsdp", fully_sharded_table(rows("fsdp")), ["size", "step ms", "/ FSDP2"], {"dtype": "fp32"}) }}

``shown`` writes the whole table to ``profiles/tables/NAME.csv`` and links to it; a page shows at most ``MOST_LINES``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from cs336_systems.answers.committed import NotMeasured, Rows
from cs336_systems.report.results import MISSING
from cs336_systems.report.tables import LABELS, Table, digits

MOST_LINES = 15
"""The most lines of a table in a page; a longer one belongs in a CSV file."""


def pivot(rows: Rows, lines: Sequence[str], columns: Mapping[str, Any], caption: str = "") -> Table:
    """Return a table with a line for each combination of some settings and a column for each quantity.

    Args:
        rows: in the order in which lines are shown.
        lines: settings that distinguish lines.
        columns: by header a metric; or ``metric`` with the settings of its cell, and optionally ``statistic`` (default
            median), ``places`` (default three significant digits) and ``scale``; ``spread`` shows mean and standard
            deviation. ``ratio`` divides two earlier columns.
        caption: text above the table.

    Raises:
        NotMeasured: there are no rows.
        ValueError: several cells match a quantity.
    """
    frame = rows.frame()
    metrics = {said if isinstance(said, str) else said.get("metric") for said in columns.values()} - {None}
    if unknown := metrics - {*frame["metric"]}:
        raise ValueError(f"no row holds the metric {min(unknown)!r}")
    found = []
    for _, line in frame[[*lines]].drop_duplicates().iterrows():
        own = frame[(frame[[*lines]] == line).all(axis=1)]
        values: dict[str, float] = {}
        shown = {_HEADERS.get(name, name): str(line[name]) for name in lines}
        for header, said in columns.items():
            asked = {"metric": said} if isinstance(said, str) else dict(said)
            shown[header] = _cell(own, header, asked, values)
        found.append(shown)
    return Table(caption, pd.DataFrame(found))


_HEADERS = LABELS | {"world_size": "ranks", "d_head": "d"}
"""Headers of settings, where they differ from the column's name."""


def _cell(own: pd.DataFrame, header: str, asked: dict[str, Any], values: dict[str, float]) -> str:
    """Return one cell's text; ``values`` holds the numbers of earlier columns, and this one's is added."""
    places, scale, spread = asked.pop("places", None), asked.pop("scale", 1), asked.pop("spread", False)
    if "ratio" in asked:
        above, below = asked["ratio"]
        if not {above, below} <= values.keys():
            return MISSING
        values[header] = scale * values[above] / values[below]
        return f"{values[header]:,.{2 if places is None else places}f}"
    metric, statistic = asked.pop("metric"), asked.pop("statistic", "mean" if spread else "median")
    cell = Rows(lambda: own).where(**asked)
    if metric not in {*own["metric"]}:
        return _ending(cell)
    try:
        values[header] = scale * cell.number(metric, statistic)
    except NotMeasured:
        return _ending(cell)
    text = digits(values[header]) if places is None else f"{values[header]:,.{places}f}"
    deviation = scale * cell.number(metric, "std") if spread else math.nan
    return text if math.isnan(deviation) else f"{text} ± {digits(deviation)}"


def _ending(cell: Rows) -> str:
    """How a cell ended that has no such metric."""
    try:
        status = str(cell.frame()["status"].iloc[-1])
    except NotMeasured:
        return MISSING
    return MISSING if status == "ok" else status


def part_of(table: Table, columns: Sequence[str] = (), where: Mapping[str, Any] | None = None) -> Table:
    """Some columns, all unless said, and the lines whose cells are as said; a list of values means any of them.

    Raises:
        ValueError: a column that the table does not have; no line; or more lines than a page shows.
    """
    frame = table.frame
    unknown = [name for name in (*columns, *(where or {})) if name not in frame]
    if unknown:
        raise ValueError(f"no column is called {unknown[0]!r}, only {', '.join(frame.columns)}")
    for name, value in (where or {}).items():
        wanted = value if isinstance(value, (list, tuple)) else [value]
        frame = frame[frame[name].astype(str).isin([str(each) for each in wanted])]
    if not 0 < len(frame) <= MOST_LINES:
        raise ValueError(f"a page shows 1 to {MOST_LINES} lines, not {len(frame)}")
    return replace(table, frame=frame[[*columns]] if columns else frame)


def quoted(table: Table, column: str, where: Mapping[str, Any]) -> str:
    """One cell of a table.

    Raises:
        ValueError: a column that the table does not have; or not one line is as said.
    """
    lines = part_of(table, [column], where).frame
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} lines have {dict(where)}, not one")
    return str(lines.iloc[0, 0])
