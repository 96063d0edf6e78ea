"""Tables in Markdown, LaTeX and CSV, and for a terminal of any width; settings that all lines share are in the caption.

Columns of numbers are right-aligned, columns of words left-aligned. On a terminal lines do not wrap: if there is too
little room, columns are left out by rank, and named below the table.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len, set_cell_size

from cs336_systems.case import TrainingCase
from cs336_systems.declared import plain_values
from cs336_systems.ranks import Parallel
from cs336_systems.report.command_line import Format

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

_UNSAID = ("", "none")
"""Values that a caption leaves out: the setting does not apply, or is not used."""
PLAIN = plain_values(TrainingCase, Parallel) | {"do_bench": "off", "losses": "0", "chunk": "0", "tokens_per_step": "0"}
"""By setting, its usual value, which a caption leaves out as well."""

LABELS = {"batch_size": "batch", "context_length": "context"}
"""Headers of settings, where they differ from the column's name."""

_FIGURE = re.compile(r"[-+~<]?\d[\d,.]*(e[-+]?\d+)?( ?\(.*\)|–[\d,.]+)?( [A-Za-zµ%/]+)?")
"""A number, optionally with its spread and its unit."""

_BLANK = ("", "–")
_GAP = 2
_WIDEST = 60
"""Characters to which a column of plain text is padded."""
_LEAST_WORDS = 24
"""Characters to which a terminal may cut a column of words, such as the message of a failure."""


@dataclass(frozen=True)
class Table:
    """A table and what all its lines share.

    Attributes:
        notes: by column, a sentence that explains its header; shown below the table.
        ranks: by column, how soon a narrow terminal drops it; the default is 1. Columns without a value are dropped
            first, then those of the highest rank, among equals the rightmost. The first column always stays.
    """

    caption: str
    frame: pd.DataFrame
    notes: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, caption: str, columns: Sequence[str], lines: Sequence[Sequence[object]], **said: Any) -> Table:
        """A table of lines, each with a cell for every column; ``said`` are the fields ``notes`` and ``ranks``."""
        import pandas as pd

        return cls(caption, pd.DataFrame(lines, columns=list(columns)), **said)

    def markdown(self, widest: int | None = None) -> str:
        """GitHub's table syntax under the caption; figures right-aligned.

        Args:
            widest: pad columns to at most this many characters; a longer cell lengthens only its own line.
        """
        cells = self.frame.map(lambda cell: " ".join(str(cell).replace("|", r"\|").splitlines()))
        cut = cells if widest is None else cells.map(lambda cell: _cut(cell, widest))
        body = cut.to_markdown(index=False, disable_numparse=True, colalign=self._alignment())
        if widest is not None:
            header, rule, *lines = body.splitlines()
            for row, (whole, short) in enumerate(zip(cells.to_numpy(), cut.to_numpy(), strict=True)):
                for cell, begun in zip(whole, short, strict=True):
                    lines[row] = lines[row].replace(begun, cell, 1) if cell != begun else lines[row]
            body = "\n".join((header, rule, *lines))
        return "\n\n".join(filter(None, (self.caption, body, self._footnote(self.frame.columns))))

    def latex(self) -> str:
        """A ``tabular`` in a ``table`` with the caption; needs the booktabs package."""
        columns = "".join("r" if side == "right" else "l" for side in self._alignment())
        caption = " ".join(filter(None, (self.caption, self._footnote(self.frame.columns)))).translate(_LATEX)
        return self.frame.to_latex(index=False, escape=True, column_format=columns, caption=caption)

    def csv(self) -> str:
        """Comma-separated, header first, without the caption."""
        return self.frame.to_csv(index=False)

    def rich(self, width: int) -> Group:
        """For a terminal of ``width`` characters."""
        import rich.box
        import rich.table
        from rich.console import Group
        from rich.text import Text

        columns = self._columns(width)
        lines = self.frame[list(columns)].map(lambda cell: " ".join(str(cell).splitlines()))
        room = width - sum(columns.values()) - _GAP * (len(columns) - 1)
        longest = {column: max(map(cell_len, lines[column]), default=0) for column in columns}
        for wanted in (longest, {column: cell_len(column) for column in columns}):
            for column, size in columns.items():
                columns[column] = size + max(0, min(room, wanted[column] - size))
                room -= columns[column] - size
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for (column, size), side in zip(columns.items(), Table("", lines)._alignment(), strict=True):
            header = "\n".join(textwrap.wrap(_bound(column), size))
            table.add_column(Text(header), justify=side, width=size, no_wrap=True)
        for line in lines.itertuples(index=False):
            table.add_row(*(Text(_cut(cell, size)) for cell, size in zip(line, columns.values(), strict=True)))
        left_out = [column for column in self.frame.columns if column not in columns]
        note = f"No room in {width} characters for: {', '.join(left_out)}. Piped, the table is whole."
        above, below = [self.caption], [self._footnote(columns), note if left_out else ""]
        return Group(*map(Text, filter(None, above)), table, *map(Text, filter(None, below)))

    def _columns(self, width: int) -> dict[str, int]:
        """The columns that a terminal has room for, with the characters that each needs at least."""
        needed = {}
        for column, side in zip(self.frame.columns, self._alignment(), strict=True):
            longest = max((cell_len(str(cell)) for cell in self.frame[column]), default=0)
            cells = min(longest, _LEAST_WORDS) if side == "left" else longest
            needed[column] = max(cells, *(cell_len(word) for word in _bound(column).split(" ")), 1)
        empty = self.frame.isin(_BLANK).all()
        droppable = sorted(list(needed)[1:], key=lambda column: (empty[column], self.ranks.get(column, 1)))
        while droppable and sum(needed.values()) + _GAP * (len(needed) - 1) > width:
            del needed[droppable.pop()]
        return {column: min(size, width) for column, size in needed.items()}

    def _footnote(self, columns: Collection[str]) -> str:
        return " ".join(f"{column}: {note}." for column, note in self.notes.items() if column in columns)

    def _alignment(self) -> list[Literal["left", "right"]]:
        return ["right" if _holds_figures(self.frame[column]) else "left" for column in self.frame.columns]


def _holds_figures(column: pd.Series[Any]) -> bool:
    cells = [str(cell).strip() for cell in column]
    words = [cell for cell in cells if cell not in _BLANK]
    return 2 * sum(bool(_FIGURE.fullmatch(cell)) for cell in words) >= len(words)


def _bound(header: str) -> str:
    """The header with no-break spaces beside its slashes."""
    return header.replace("/ ", "/\xa0").replace(" /", "\xa0/")


def _cut(cell: str, size: int) -> str:
    return cell if cell_len(cell) <= size else set_cell_size(cell, size - 1) + "…"


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%_#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def settings_split(
    frame: pd.DataFrame, settings: list[str], always: Collection[str] = ("size",), labels: Mapping[str, str] = LABELS
) -> tuple[str, list[str]]:
    """Return a caption of the settings that all lines share, and the names of the settings that remain columns."""
    if frame.empty:
        return "", settings
    constant = [column for column in settings if column not in always and frame[column].nunique(dropna=False) == 1]
    varying = [column for column in settings if column not in constant]
    caption = ", ".join(
        f"{labels.get(column, column)} {frame[column].iloc[0]}"
        for column in constant
        if (value := str(frame[column].iloc[0])) not in _UNSAID and value != PLAIN.get(column)
    )
    return caption, varying


def digits(value: float) -> str:
    """Format a number with three significant digits, without an exponent."""
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:,.{max(0, 2 - exponent)}f}"


def show(table: Table, form: Format) -> None:
    """Print a table; ``auto`` fits it to a terminal and writes Markdown elsewhere."""
    if form == "auto" and sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(table.rich(console.width))
    else:
        print({"latex": table.latex, "csv": table.csv}.get(form, partial(table.markdown, _WIDEST))())
    print()
