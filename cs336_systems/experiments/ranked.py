"""The course of a benchmark that several ranks run together: check, run, let rank 0 show and end."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cs336_systems.harness.ranks import MeasureRanked, RankedCell, reports, run_ranked_sweep
from cs336_systems.harness.record import RowFile
from cs336_systems.harness.sweep import Outcome, cell_columns
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.tables import TraceError
from cs336_systems.report.console import complain, finish
from cs336_systems.report.timeline import draw_timeline


class RankedOptions(Protocol):
    """What every such benchmark is asked, among other things."""

    @property
    def device(self) -> str: ...
    @property
    def out(self) -> Path | None: ...
    @property
    def timeout(self) -> float: ...


class TracedCell(RankedCell, Protocol):
    """A cell whose recording has a name."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class RankedBenchmark:
    """A benchmark's own parts.

    Attributes:
        cell: the dataclass of its cells, whose fields are columns.
        measure: see ``run_ranked_sweep``.
        headlines: metrics of the last line on stdout.
    """

    name: str
    cell: type
    measure: MeasureRanked
    describe: Callable[[Any], str]
    headlines: Sequence[str]

    def run(
        self,
        options: RankedOptions,
        make_cells: Callable[[], Sequence[RankedCell]],
        present: Callable[[list[Outcome], Path | None], int | None],
        note: str = "",
    ) -> int:
        """Measure all cells; the process that ``reports`` presents them.

        Args:
            make_cells: raises ValueError if the options do not make cells.
            present: prints tables and draws figures, given the outcomes and the file of rows; a number that is not
                zero becomes the exit code.
            note: printed on stderr first.

        Returns:
            The exit code: 2 for bad input, and as ``finish``.
        """
        csv = options.out / f"{self.name}.csv" if options.out else None
        try:
            cells = make_cells()
            row_file = RowFile(csv, cell_columns(self.cell)) if csv and reports() else None
            if note and reports():
                print(note, file=sys.stderr)
            outcomes = run_ranked_sweep(
                self.name,
                cells,
                self.measure,
                device=options.device,
                row_file=row_file,
                timeout_s=options.timeout,
                describe=self.describe,
            )
            if not reports():
                return 0
            code = present(outcomes, csv)
        except ValueError as error:
            return complain(self.name, str(error))
        except OSError as error:
            return complain(self.name, f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return finish(self.name, outcomes, self.describe, self.headlines, csv) or code or 0


def draw_traces(outcomes: Sequence[Outcome], folder: Path, describe: Callable[[Any], str]) -> None:
    """Draw the last step of each recording beside it; say on stderr where, or why not."""
    for outcome in outcomes:
        cell: TracedCell = outcome.cell
        if outcome.status != "ok":
            continue
        picture = folder / f"{cell.name}.png"
        try:
            trace = kineto.read(folder / f"{cell.name}.json.gz")
            draw_timeline(trace, ["forward", "backward", "optimizer"], describe(cell), picture)
        except (TraceError, OSError) as error:
            print(f"no picture of {describe(cell)}: {error}", file=sys.stderr)
            continue
        limits = "" if trace.has_gpu else " (no GPU sections: a CPU's trace shows calls, not what gloo's threads send)"
        print(f"{picture}{limits}", file=sys.stderr)
