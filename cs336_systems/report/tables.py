"""Rows as tables for people: Markdown, LaTeX, CSV; one line per cell, constants moved into the caption.

``step_table`` is the table of ``benchmark_model.py``. It reads nothing but rows, so that a table on the terminal and
in a document is the same table. Conventions that a number depends on stand in its column's name.
"""

from dataclasses import dataclass
from typing import Literal

import pandas as pd
import rich.table
from rich.text import Text

SETTINGS = (
    "device",
    "size",
    "batch_size",
    "context_length",
    "dtype",
    "compile",
    "optimizer",
    "mode",
    "warmup",
    "steps",
)
"""Columns that tell one cell of a model benchmark from another."""

CEILING = "ceiling"
"""Variant of the rows that hold the ceilings measured in the same run."""

_LABELS = {"batch_size": "batch", "context_length": "context"}


@dataclass(frozen=True)
class Table:
    """A table and what all its lines share."""

    caption: str
    frame: pd.DataFrame

    def markdown(self) -> str:
        """GitHub's table syntax under the caption; numbers right-aligned."""
        cells = self.frame.map(lambda cell: " ".join(str(cell).replace("|", r"\|").splitlines()))
        body = cells.to_markdown(index=False, disable_numparse=True, colalign=self._alignment())
        return f"{self.caption}\n\n{body}" if self.caption else body

    def latex(self) -> str:
        """A ``tabular`` in a ``table`` with the caption; needs the booktabs package."""
        columns = "".join("r" if side == "right" else "l" for side in self._alignment())
        return self.frame.to_latex(index=False, escape=True, column_format=columns, caption=_escape_latex(self.caption))

    def rich(self) -> rich.table.Table:
        """For a terminal."""
        table = rich.table.Table(title=Text(self.caption) if self.caption else None, title_justify="left")
        for column, side in zip(self.frame.columns, self._alignment(), strict=True):
            table.add_column(column, justify=side)
        for line in self.frame.itertuples(index=False):
            table.add_row(*(Text(str(cell)) for cell in line))  # brackets in a message are no markup
        return table

    def csv(self) -> str:
        """Comma-separated, header first, without the caption."""
        return self.frame.to_csv(index=False)

    def _alignment(self) -> list[Literal["left", "right"]]:
        words = {"size", "dtype", "mode", "status", "device", "optimizer", "variant", "phase", "verdict", "metric"}
        return ["left" if column in words else "right" for column in self.frame.columns]


_LATEX = {character: f"\\{character}" for character in "&%_#${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def step_table(rows: pd.DataFrame) -> Table:
    """One line per cell: time of each phase and of the whole step, rates, memory predicted and measured, status.

    Where the rows hold a cell several times, its newest outcome wins.

    Args:
        rows: of ``benchmark_model.py``, as ``read_rows`` returns them or as collected in memory.
    """
    rows = rows[rows["variant"] != CEILING]
    settings = [column for column in ("gpu", *SETTINGS) if column in rows.columns]
    lines = []
    for _, cell in rows.groupby(settings, sort=False, dropna=False):
        cell = cell[cell["timestamp"] == cell["timestamp"].iloc[-1]]
        first = cell.iloc[0]
        metrics = {row["metric"]: row for _, row in cell.iterrows() if row["metric"]}
        lines.append({column: first[column] for column in settings} | _step_line(metrics, first))
    frame = pd.DataFrame(lines)
    caption, varying = settings_split(frame, settings)
    return Table(caption, frame[varying + [c for c in frame.columns if c not in settings]].rename(columns=_LABELS))


def _step_line(metrics: dict[str, pd.Series], first: pd.Series) -> dict[str, str]:
    def spread(name: str) -> str:
        row = metrics.get(name)
        if row is None:
            return "–"
        return f"{_digits(row['median'])} ({_digits(row['p10'])}–{_digits(row['p90'])})"

    def median(name: str, form: str = "") -> str:
        row = metrics.get(name)
        return "–" if row is None else f"{row['median']:{form}}" if form else _digits(row["median"])

    status = first["status"] if first["status"] == "ok" else f"{first['status']}: {first['message']}"
    return {
        "forward ms": spread("forward"),
        "backward ms": spread("backward"),
        "optimizer ms": spread("optimizer"),
        "total ms": spread("step"),
        "tokens/s": median("tokens_per_s", ",.0f"),
        "TFLOP/s": median("model_tflops"),
        "MFU %": median("mfu", ".1f"),
        "% of ceiling": median("matmul_ceiling_share", ".1f"),
        "peak GiB": median("peak_memory"),
        "predicted GiB": median("predicted_peak_memory"),
        "status": status,
    }


def median_of(rows: pd.DataFrame, metric: str) -> float:
    """The median of ``metric`` in rows of one cell, the newest if it was measured several times.

    Raises:
        ValueError: the rows do not hold the metric.
    """
    found = rows[rows["metric"] == metric]
    if found.empty:
        raise ValueError(f"no row holds the metric {metric!r}")
    return float(found["median"].iloc[-1])


def settings_split(frame: pd.DataFrame, settings: list[str]) -> tuple[str, list[str]]:
    """Settings that every line shares, as a caption, and the names of those that vary; the size is always a column."""
    if frame.empty:
        return "", settings
    constant = [column for column in settings if column != "size" and frame[column].nunique(dropna=False) == 1]
    varying = [column for column in settings if column not in constant]
    caption = ", ".join(
        f"{_LABELS.get(column, column)} {frame[column].iloc[0]}" for column in constant if frame[column].iloc[0] != ""
    )
    return caption, varying


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:,.{max(0, 2 - exponent)}f}"
