"""A grid of cells, each ending as rows that are on disk before the next one starts.

A *cell* is a frozen dataclass with at least ``device: str``, ``seed: int`` and a ``variant`` (field or property); its
fields become columns. Each runs in a fresh process (``process.py`` says how it can end); a grid of cheap cells may let
those that agree in something share one. A cell with a ``world_size`` is measured by as many ranks: fresh processes, or
under torchrun the processes that it has started (``launched.py``). Ctrl-C ends a sweep with an ``interrupted`` row for
the cell that was running.
"""

import json
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch.distributed.elastic.multiprocessing.errors import record

from cs336_systems.distributed.process_group import launched
from cs336_systems.harness.launched import LaunchedSweep
from cs336_systems.harness.process import Cell, Measure, Report, measure_in, reported, serve
from cs336_systems.harness.provenance import timestamp
from cs336_systems.harness.ranks import measure_on_ranks, reports
from cs336_systems.harness.record import SCHEMA_VERSION, Metric, Row, RowFile, parse_samples, schema_columns
from cs336_systems.processes import EXIT_GRACE_S, FreshProcess


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


def make_rows(benchmark: str, outcome: Outcome, report: Report) -> list[Row]:
    """A row for each metric of the outcome, or the one row of a cell without any; ``report`` says where it ran."""
    cell = outcome.cell
    shared: Row = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        **{name: value for name, value in asdict(cell).items() if name != "samples"},  # asked for, not measured
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


@dataclass
class _Log:
    """The outcomes of a sweep: rows in the file, and for who waits a bar on a terminal, a line per cell elsewhere too.

    The bar advances by the seconds that a cell should take, or by one; what is left is the sum over the cells to come,
    scaled by how the finished ones compared with theirs.
    """

    benchmark: str
    cells: Sequence[Cell]
    row_file: RowFile | None
    expected_s: Callable[[Any], float] | None

    def __post_init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.expected = [self.expected_s(cell) if self.expected_s else 1.0 for cell in self.cells]
        self.console = Console(stderr=True, quiet=not reports())
        columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
        self.progress = Progress(
            *([*columns, _Countdown()] if self.expected_s else columns),
            console=self.console,
            disable=not (self.console.is_terminal and reports()),
            transient=True,
        )
        total = sum(self.expected)
        self.started = time.perf_counter()
        self.task = self.progress.add_task("", total=total, ends=self.started + total)
        self._begin()

    def _begin(self) -> None:
        self.cell_started = time.perf_counter()
        if (number := len(self.outcomes)) < len(self.cells):
            self.place = f"[{number + 1}/{len(self.cells)}] {self.cells[number]}"
            self.progress.update(self.task, description=self.place)

    def outcome(self, report: Report) -> Outcome:
        """What the report says of the present cell."""
        cell, seconds = self.cells[len(self.outcomes)], time.perf_counter() - self.cell_started
        outcome = Outcome(cell, report["status"], report["message"], report["metrics"], seconds=seconds)
        outcome.rows = make_rows(self.benchmark, outcome, report)
        return outcome

    def keep(self, outcome: Outcome) -> None:
        """Write the rows, say so, turn to the next cell."""
        self.outcomes.append(outcome)
        if self.row_file is not None:
            self.row_file.append(outcome.rows)
        note = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
        line = f"{self.place}: {note} ({outcome.seconds:.1f} s)"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        now, done = time.perf_counter(), len(self.outcomes)
        seconds_left = (now - self.started) / sum(self.expected[:done]) * sum(self.expected[done:])
        self.progress.update(self.task, advance=self.expected[done - 1], ends=now + seconds_left)
        self._begin()


def run_sweep(
    benchmark: str,
    cells: Sequence[Cell],
    measure: Measure,
    *,
    row_file: RowFile | None,
    timeout_s: float,
    expected_s: Callable[[Any], float] | None = None,
    share: Callable[[Any], Hashable] | None = None,
) -> Iterator[Outcome]:
    """Run every cell in turn; yield its outcome, then write its rows, before the next one starts. Ctrl-C is the last.

    Under a launcher the cells have a ``world_size`` each. Its rank 0 writes the rows and yields the outcomes once all
    cells have ended; the other ranks yield nothing.

    Args:
        measure: a module-level function: ``measure(cell)``, or for cells with a ``world_size`` ``measure(cell, rank)``,
            which runs on every rank and reduces over ranks what has to be reduced; rank 0's metrics become rows.
        row_file: where rows are appended, of the process that ``reports``; None keeps them in memory only.
        timeout_s: how long a cell may take, and a collective may wait for the other ranks; under a launcher the latter.
        expected_s: seconds that a cell should take; without it there is no estimate of what is left.
        share: successive cells with equal values share a process while none of them leaves it in doubt; by default
            every cell has its own.

    Raises:
        OSError: the rows of the outcome yielded last could not be written; all earlier ones are on disk.
        ValueError: a launcher has described its ranks badly, or the device is not there.
        RankFailed: under a launcher, a cell has failed on this rank but not on all: its row is written.
    """
    log = _Log(benchmark, cells, row_file, expected_s)
    if launched() and cells and hasattr(cells[0], "world_size"):
        sweep = LaunchedSweep(cells, measure, timeout_s, lambda report: log.keep(log.outcome(report)))
        with log.progress:
            record(sweep.run)()  # torchrun shows the error of the rank that failed first
        yield from log.outcomes if reports() else []
        return
    with log.progress, closing(_isolated(cells, measure, timeout_s, share)) as ended:
        for report in ended:
            outcome = log.outcome(report)
            yield outcome
            log.keep(outcome)
            if outcome.status == "interrupted":
                return


def _isolated(
    cells: Sequence[Cell], measure: Measure, timeout_s: float, share: Callable[[Any], Hashable] | None
) -> Generator[Report, None, None]:
    """How each cell ended in processes of its own, or in one that it shares with its neighbours."""
    process: FreshProcess | None = None
    try:
        for i, cell in enumerate(cells):
            deadline = time.monotonic() + timeout_s
            with reported(timeout_s) as report:
                if hasattr(cell, "world_size"):
                    measure_on_ranks(measure, cell, timeout_s, report)
                else:
                    process = process or FreshProcess(serve, measure)
                    measure_in(process, cell, deadline, report)
            shared = share is not None and i + 1 < len(cells) and share(cells[i + 1]) == share(cell)
            in_doubt = report["status"] in ("timeout", "error", "interrupted")
            if process is not None and (in_doubt or not shared or not process.is_alive()):
                process.end(grace_s=0.0 if in_doubt else EXIT_GRACE_S)
                process = None
            yield report
    finally:
        if process is not None:
            process.end()
