"""Tables for people: drawn on a terminal, Markdown elsewhere."""

import sys
from typing import Literal

from rich.console import Console
from rich.measure import Measurement

from cs336_systems.report.tables import Table

Format = Literal["auto", "markdown", "latex", "csv"]


def show(table: Table, form: Format) -> None:
    """Print a table on stdout; ``auto`` draws on a terminal (stacked on a narrow one) and writes Markdown elsewhere."""
    if form == "auto" and sys.stdout.isatty():
        console = Console()
        drawn = table.rich()
        if Measurement.get(console, console.options.update(max_width=10_000), drawn).maximum <= console.width:
            console.print(drawn)
        else:
            print(table.stacked())
    else:
        print({"latex": table.latex, "csv": table.csv}.get(form, table.markdown)())
    print()
