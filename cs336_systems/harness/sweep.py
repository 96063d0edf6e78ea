"""A grid of cells, each ending as rows that are on disk before the next one starts.

A *cell* is a frozen dataclass with at least ``device: str``, ``seed: int`` and a ``variant`` (field or property); its
fields become columns. Each runs in a fresh process (``process.py`` says how it can end); a grid of cheap cells may let
those that agree in something share one. Ctrl-C ends a sweep with an ``interrupted`` row for the cell that was running.
"""

import json
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from cs336_systems.harness.process import Cell, CellProcess, Measure, Report
from cs336_systems.harness.provenance import timestamp
from cs336_systems.harness.record import SCHEMA_VERSION, Metric, Row, RowFile, parse_samples, schema_columns


@dataclass
class Outcome:
    """How one cell ended, and its rows."""

    cell: Any
    status: str
    message: str = ""
    metrics: list[Metric] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    """Wall-clock time from the start of the cell's process to its end."""

    def median(self, metric: str) -> float | None:
        """The median of a metric, or None if the cell did not yield it."""
        for row in self.rows:
            if row.get("metric") == metric:
                return row["median"]
        return None


def outcome_rows(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """The rows of the outcomes, as ``read_rows`` would return them from a file."""
    frame = pd.DataFrame([row for outcome in outcomes for row in outcome.rows])
    return parse_samples(frame.reindex(columns=list(dict.fromkeys([*frame.columns, *schema_columns(())]))))


def cell_columns(cell_type: type) -> list[str]:
    """CSV columns of a cell type: its fields, but for those that the schema already has."""
    return [f.name for f in fields(cell_type) if f.name not in ("variant", "seed")]


def run_cell(benchmark: str, measure: Measure, cell: Cell, timeout_s: float) -> Outcome:
    """Run ``measure(cell)`` in a process of its own and return how it ended, rows included."""
    process = CellProcess(measure)
    try:
        return _outcome(benchmark, process, cell, timeout_s)
    finally:
        process.close()


def _outcome(benchmark: str, process: CellProcess, cell: Cell, timeout_s: float) -> Outcome:
    started = time.perf_counter()
    report = process.run(cell, timeout_s)
    seconds = time.perf_counter() - started
    outcome = Outcome(cell, report["status"], report["message"], report["metrics"], seconds=seconds)
    outcome.rows = make_rows(benchmark, outcome, report)
    return outcome


def make_rows(benchmark: str, outcome: Outcome, report: Report) -> list[Row]:
    """A row for each metric of the outcome, or the one row of a cell without any; ``report`` says where it ran."""
    cell = outcome.cell
    shared: Row = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        **asdict(cell),
        "variant": cell.variant,
        "status": outcome.status,
        "message": outcome.message,
        **report.get("provenance", {}),
        "seed": cell.seed,
        "timestamp": timestamp(),
        "state_before": json.dumps(report.get("state_before", {})),
        "state_after": json.dumps(report.get("state_after", {})),
    }
    return [shared | metric.statistics() for metric in outcome.metrics] or [shared]


class _Countdown(ProgressColumn):
    """Time until the sweep should end, or nothing once that has passed."""

    def render(self, task: Task) -> Text:
        left = round(task.fields["ends"] - time.perf_counter())
        return Text(f"about {timedelta(seconds=left)} left" if left > 0 else "any moment")


def run_sweep(
    benchmark: str,
    cells: Sequence[Cell],
    measure: Measure,
    *,
    row_file: RowFile | None,
    timeout_s: float,
    describe: Callable[[Any], str],
    cost: Callable[[Any], float],
    console: Console,
    share: Callable[[Any], Hashable] | None = None,
) -> Iterator[Outcome]:
    """Run every cell in turn; yield its outcome, then write its rows, before the next one starts. Ctrl-C is the last.

    Args:
        row_file: where rows are appended; None keeps them in memory only.
        describe: a short name of a cell for the progress display.
        cost: seconds that a cell should take; what is left is the sum over the cells to come, scaled by how the
            finished ones compared with theirs.
        console: where progress goes; on anything but a terminal, one plain line per finished cell.
        share: successive cells with equal values share a process while none of them leaves it in doubt; by default
            every cell has its own.

    Raises:
        OSError: the rows of the outcome yielded last could not be written; all earlier ones are on disk.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        _Countdown(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    costs = [cost(cell) for cell in cells]
    started = time.perf_counter()
    process: CellProcess | None = None
    try:
        with progress:
            task = progress.add_task("", total=sum(costs), ends=started + sum(costs))
            for i, cell in enumerate(cells):
                place = f"[{i + 1}/{len(cells)}] {describe(cell)}"
                progress.update(task, description=place)
                process = process or CellProcess(measure)
                outcome = _outcome(benchmark, process, cell, timeout_s)
                shared = share is not None and i + 1 < len(cells) and share(cells[i + 1]) == share(cell)
                if not (shared and process.usable):
                    process.close()
                    process = None
                yield outcome
                if row_file is not None:
                    row_file.append(outcome.rows)
                note = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
                console.print(
                    f"{place}: {note} ({outcome.seconds:.1f} s)", markup=False, highlight=False, soft_wrap=True
                )
                if outcome.status == "interrupted":
                    return
                now = time.perf_counter()
                seconds_left = (now - started) / sum(costs[: i + 1]) * sum(costs[i + 1 :])
                progress.update(task, advance=costs[i], ends=now + seconds_left)
    finally:
        if process is not None:
            process.close()
