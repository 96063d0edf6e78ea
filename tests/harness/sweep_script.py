"""Sweeps for tests that press Ctrl-C, kill or launch them: ``python -m`` this, FOLDER, CELL ..., each named as below.

``what`` alone is a cell of one process, ``what@2`` one of two ranks. The first cell is a sweep of its own, the others
are a second one in the same process. It prints a line before they begin.
"""

import json
import signal
import sys
from pathlib import Path

from cs336_systems.harness.isolation import reports
from cs336_systems.harness.record import RowFile
from cs336_systems.harness.sweep import cell_columns, run_sweep
from cs336_systems.processes import start_server
from cs336_systems.report.command_line import INTERRUPTED, exit_with
from tests.harness.cells import Cell, RankedCell, measure


def make_cell(name: str, folder: str) -> Cell:
    what, _, world_size = name.partition("@")
    return RankedCell(what, folder, world_size=int(world_size)) if world_size else Cell(what, folder)


def main() -> int:
    """Sweep twice into the folder named on the command line; prints how the cells ended, returns 130 after Ctrl-C."""
    start_server("tests.harness.cells")  # without the compiler, whose import takes seconds
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has SIGINT ignored
    folder, *names = sys.argv[1:]
    csv, cells = Path(folder, "rows.csv"), [make_cell(name, folder) for name in names]
    row_file = RowFile(csv, cell_columns(type(cells[0]))) if reports() else None
    print("begins", flush=True)
    outcomes = []
    for part in (cells[:1], cells[1:]):
        outcomes += run_sweep("script", part, measure, row_file=row_file, timeout_s=550)
    print(json.dumps([outcome.status for outcome in outcomes]))
    return INTERRUPTED if outcomes and outcomes[-1].status == "interrupted" else 0


if __name__ == "__main__":
    exit_with("script", main)
