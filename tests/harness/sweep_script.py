"""A sweep of four cells, the third of which never ends: for tests that press Ctrl-C or kill it. Run with -m."""

import signal
import sys
from pathlib import Path

from rich.console import Console

from cs336_systems.harness.record import RowFile
from cs336_systems.harness.sweep import cell_columns, run_sweep
from cs336_systems.report.console import finish
from tests.harness.cells import Cell, measure


def main() -> int:
    """Sweep into the folder named on the command line; returns the exit code of a benchmark."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has SIGINT ignored
    folder = Path(sys.argv[1])
    csv = folder / "rows.csv"
    outcomes = list(
        run_sweep(
            "script",
            [Cell(what, str(folder)) for what in ("ok", "ok", "sleep", "ok")],
            measure,
            row_file=RowFile(csv, cell_columns(Cell)),
            timeout_s=100,
            describe=lambda cell: cell.what,
            cost=lambda cell: 1.0,
            console=Console(stderr=True),
        )
    )
    return finish("script", outcomes, lambda cell: cell.what, ("value",), csv)


if __name__ == "__main__":
    sys.exit(main())
