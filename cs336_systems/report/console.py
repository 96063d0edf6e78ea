"""What a benchmark says to whoever ran it: tables, one sentence on bad input, a last line of JSON."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from rich.console import Console

from cs336_systems.measurement.sweep import Outcome
from cs336_systems.report.tables import Table

Format = Literal["auto", "markdown", "latex", "csv"]

BAD_INPUT = 2
INTERRUPTED = 130


def show(table: Table, form: Format) -> None:
    """Print a table on stdout; ``auto`` draws it on a terminal and writes Markdown elsewhere."""
    if form == "auto" and sys.stdout.isatty():
        Console().print(table.rich())
    else:
        print({"latex": table.latex, "csv": table.csv}.get(form, table.markdown)())


def complain(benchmark: str, message: str) -> int:
    """One sentence on stderr; returns the exit code of bad input."""
    print(f"{benchmark}: {message}", file=sys.stderr)
    return BAD_INPUT


def exit_with(benchmark: str, main: Callable[[], int]) -> NoReturn:
    """Run a command's ``main`` and exit with its code; Ctrl-C at any moment is one sentence, not a traceback."""
    try:
        code = main()
    except KeyboardInterrupt:
        print(f"{benchmark}: interrupted; every finished row is kept", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def finish(
    benchmark: str,
    outcomes: Sequence[Outcome],
    describe: Callable[[Any], str],
    metrics: Sequence[str],
    csv: Path | None,
) -> int:
    """Print the last line of stdout, one JSON object with the medians of ``metrics``; returns the exit code."""
    cells = [
        {"cell": describe(outcome.cell), "status": outcome.status}
        | {name: median for name in metrics if (median := outcome.median(name)) is not None}
        for outcome in outcomes
    ]
    ok = sum(outcome.status == "ok" for outcome in outcomes)
    print(json.dumps({"benchmark": benchmark, "ok": ok, "cells": cells, "csv": str(csv) if csv else None}))
    return INTERRUPTED if outcomes and outcomes[-1].status == "interrupted" else 0
