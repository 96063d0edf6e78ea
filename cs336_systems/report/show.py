"""Tables on stdout."""

import sys
from functools import partial

from cs336_systems.report.command_line import Format
from cs336_systems.report.tables import WIDEST, Table


def show(table: Table, form: Format) -> None:
    """Print a table; ``auto`` fits it to a terminal and writes Markdown elsewhere."""
    if form == "auto" and sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(table.rich(console.width))
    else:
        print({"latex": table.latex, "csv": table.csv}.get(form, partial(table.markdown, WIDEST))())
    print()
