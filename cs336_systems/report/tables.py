"""Rows as tables for people: Markdown, LaTeX, CSV; one line per cell, constants moved into the caption.

``step_table`` is the table of ``benchmark_model.py``. It reads nothing but rows, so that a table on the terminal and
in a document is the same table. Conventions that a number depends on stand in its column's name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import rich.table
from rich.text import Text

from cs336_systems.harness.record import read_rows

SETTINGS = (
    "device",
    "size",
    "batch_size",
    "context_length",
    "dtype",
    "attention",
    "compile",
    "checkpoint",
    "optimizer",
    "mode",
    "warmup",
    "steps",
)
"""Columns that tell one cell of a model benchmark from another."""

CEILING = "ceiling"
"""Variant of the rows that hold the ceilings measured in the same run."""

BEFORE_THE_COLUMN = {"checkpoint": "none"}
"""Settings that rows measured before they existed lack, with the value that those cells had."""

_UNSAID = ("", "none")
"""Values of a setting that a caption leaves out: it does not apply, or is not used."""

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

    def stacked(self) -> str:
        """For a narrow terminal: one block per line of the table, one value per line of the block."""
        width = max((len(column) for column in self.frame.columns), default=0)
        blocks = [
            "\n".join(f"{column:<{width}}  {value}" for column, value in line.items())
            for line in self.frame.to_dict("records")
        ]
        return "\n\n".join([self.caption, *blocks] if self.caption else blocks)

    def csv(self) -> str:
        """Comma-separated, header first, without the caption."""
        return self.frame.to_csv(index=False)

    def _alignment(self) -> list[Literal["left", "right"]]:
        words = {"size", "dtype", "mode", "status", "device", "optimizer", "variant", "phase", "verdict", "metric"} | {
            "attention",
            "compile",
            "checkpoint",
            "impl",
            "kernel",
            "subject",
            "class",
            "stage",
            "module",
            "direction",
            "pass",
            "category",
            "source",
            "kept by",
            "parameter",
            "how",
            "accumulator",
            "dtype of terms",
            "explanation",
            "tensor",
            "fp16",
            "bf16",
            "collective",
            "backend",
        }
        return ["left" if column in words else "right" for column in self.frame.columns]


_LATEX = {character: f"\\{character}" for character in "&%_#${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def read_model_rows(path: Path, cell_columns: Iterable[str] = ()) -> pd.DataFrame:
    """Rows of ``benchmark_model.py``, of whatever age: settings that came later have their value from before.

    Raises:
        ValueError: as ``read_rows``, for any other column that is missing.
        OSError: the file cannot be read.
    """
    rows = read_rows(path, [column for column in cell_columns if column not in BEFORE_THE_COLUMN])
    return rows.assign(**{name: value for name, value in BEFORE_THE_COLUMN.items() if name not in rows.columns})


def step_table(rows: pd.DataFrame) -> Table:
    """One line per cell: time of each phase and of the whole step, rates, memory predicted and measured, status.

    Where the rows hold a cell several times, the repeats of its newest run are pooled and older runs left out.

    Args:
        rows: of ``benchmark_model.py``, as ``read_rows`` returns them or as collected in memory.
    """
    rows = rows[rows["variant"] != CEILING]
    settings = [column for column in ("gpu", *SETTINGS) if column in rows.columns]
    lines = []
    for _, cell in rows.groupby(settings, sort=False, dropna=False):
        cell = newest_run(cell)
        first = cell.iloc[0]
        metrics = {name: _pooled(cell[cell["metric"] == name]) for name in cell["metric"].unique() if name}
        lines.append({column: first[column] for column in settings} | _step_line(metrics, first))
    frame = pd.DataFrame(lines)
    caption, varying = settings_split(frame, settings)
    return Table(caption, frame[varying + [c for c in frame.columns if c not in settings]].rename(columns=_LABELS))


def newest_run(cell: pd.DataFrame) -> pd.DataFrame:
    """The rows of a cell from the last process that measured it, and from the earlier repeats of the same command."""
    last = cell.iloc[-1]
    same = cell[(cell["argv"] == last["argv"]) & (cell["status"] == last["status"])]
    newest = same.drop_duplicates(["repeat", "metric"], keep="last") if "repeat" in same else same
    return newest if last["status"] == "ok" else newest.iloc[-1:]


def _pooled(rows: pd.DataFrame) -> pd.Series:
    """One metric of several repeats: the median of their medians, between the lowest p10 and the highest p90."""
    return pd.Series({"median": rows["median"].median(), "p10": rows["p10"].min(), "p90": rows["p90"].max()})


def _step_line(metrics: dict[str, pd.Series], first: pd.Series) -> dict[str, str]:
    def spread(name: str) -> str:
        row = metrics.get(name)
        if row is None:
            return "–"
        return f"{digits(row['median'])} ({digits(row['p10'])}–{digits(row['p90'])})"

    def median(name: str, form: str = "") -> str:
        row = metrics.get(name)
        return "–" if row is None else f"{row['median']:{form}}" if form else digits(row["median"])

    status = first["status"] if first["status"] == "ok" else f"{first['status']}: {first['message']}"
    return {
        "forward ms": spread("forward"),
        "backward ms": spread("backward"),
        "optimizer ms": spread("optimizer"),
        "total ms": spread("step"),
        "tokens/s": median("tokens_per_s"),
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


def settings_split(frame: pd.DataFrame, settings: list[str], always: str = "size") -> tuple[str, list[str]]:
    """Settings that every line shares, as a caption, and the names of those that vary; ``always`` counts as varying."""
    if frame.empty:
        return "", settings
    constant = [column for column in settings if column != always and frame[column].nunique(dropna=False) == 1]
    varying = [column for column in settings if column not in constant]
    caption = ", ".join(
        f"{_LABELS.get(column, column)} {frame[column].iloc[0]}"
        for column in constant
        if frame[column].iloc[0] not in _UNSAID
    )
    return caption, varying


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:,.{max(0, 2 - exponent)}f}"
