"""A grid of cells, each ending as rows that are on disk before the next one starts.

A *cell* is a frozen dataclass with at least ``device: str``, ``seed: int`` and a ``variant`` (field or property); its
fields become columns. Each is measured in fresh processes, which cells of a grid may share (``isolation.py`` says how a
cell can end). Ctrl-C ends a sweep with an ``interrupted`` row for the cell that was running. Importing this module
imports no torch.
"""

import json
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cs336_systems.harness.isolation import Cell, Measure, Report, isolated, reports
from cs336_systems.harness.provenance import timestamp
from cs336_systems.harness.record import SCHEMA_VERSION, Metric, Row, RowFile, parse_samples, schema_columns
from cs336_systems.harness.runs import pooled


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


class _Log:
    """Writes the rows of a sweep's outcomes, and shows a line per cell with its main figures.

    What runs is shown as well: by a bar on a terminal, by a line with the time of day elsewhere.
    """

    def __init__(
        self, benchmark: str, cells: Sequence[Cell], row_file: RowFile | None, headlines: Collection[str]
    ) -> None:
        self._benchmark, self._cells, self._row_file, self._headlines = benchmark, cells, row_file, headlines
        self._n_done = 0
        self._console = Console(stderr=True, quiet=not reports())
        self.progress = Progress(
            *(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
            console=self._console,
            disable=not (self._console.is_terminal and reports()),
            transient=True,
        )
        self._task = self.progress.add_task("", total=len(cells))
        self._begin()

    def _begin(self) -> None:
        self._cell_started = time.perf_counter()
        if self._n_done < len(self._cells):
            self._place = f"[{self._n_done + 1}/{len(self._cells)}] {self._cells[self._n_done]}"
            self.progress.update(self._task, description=self._place)
            if self.progress.disable:
                self._say(f"{self._place}: runs since {time.strftime('%H:%M:%S')}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def outcome(self, report: Report) -> Outcome:
        """The outcome of the present cell, as the report says."""
        seconds = time.perf_counter() - self._cell_started
        outcome = Outcome(
            self._cells[self._n_done], report["status"], report["message"], report["metrics"], seconds=seconds
        )
        outcome.rows = make_rows(self._benchmark, outcome, report)
        return outcome

    def keep(self, outcome: Outcome) -> None:
        """Write the rows, say so, turn to the next cell."""
        if self._row_file is not None:
            self._row_file.append(outcome.rows)
        note = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
        rows = pooled(outcome_rows([outcome]))  # as tables show them
        shown = rows[rows["metric"].isin(self._headlines)]
        figures = [f"{row['metric']} {row['median']:.4g} {row['unit']}".rstrip() for _, row in shown.iterrows()]
        self._say(", ".join([f"{self._place}: {note} ({outcome.seconds:.1f} s)", *figures]))
        self._n_done += 1
        self.progress.update(self._task, advance=1)
        if outcome.status != "interrupted":
            self._begin()


def run_sweep(
    benchmark: str,
    cells: Sequence[Cell],
    measure: Measure,
    *,
    row_file: RowFile | None,
    timeout_s: float,
    share: Callable[[Any], Hashable] | None = None,
    headlines: Collection[str] = (),
) -> Iterator[Outcome]:
    """Run every cell in turn; yield its outcome, then write its rows, before the next one starts. Ctrl-C is the last.

    Under a launcher the cells have a ``world_size`` each, and every process of the launcher yields the same outcomes.

    Args:
        measure: a module-level function: ``measure(cell)``, or for cells with a ``world_size`` ``measure(cell, rank)``,
            which runs on every rank and reduces over ranks what has to be reduced; rank 0's metrics become rows.
        row_file: where rows are appended, if this process ``reports``; None keeps them in memory only.
        timeout_s: how long a cell may take, and a collective in it may wait for the other ranks.
        share: successive cells with equal values share processes while none of them leaves these in doubt; by default
            every cell has its own. Under a launcher all cells share.
        headlines: metrics that are shown on stderr as soon as a cell has ended.

    Raises:
        OSError: the rows of the outcome yielded last could not be written; all earlier ones are on disk.
        ValueError: a launcher has described its ranks badly.
        RuntimeError: a process of the launcher has died; the rows of all earlier cells are on disk.
    """
    log = _Log(benchmark, cells, row_file, headlines)
    with log.progress, closing(isolated(cells, measure, timeout_s, share)) as ended:
        for report in ended:
            outcome = log.outcome(report)
            yield outcome
            log.keep(outcome)
            if outcome.status == "interrupted":
                return
