"""A grid of cells, each run in a fresh process, each ending as rows.

A process of its own means that no cell inherits another's memory, caches, compiled code or broken CUDA context, and
that a cell which is killed, hangs or runs out of memory costs only itself. Processes are forked from a server that
has imported the libraries but touched no device, so a fresh one starts in milliseconds instead of seconds.

A *cell* is a frozen dataclass with at least ``device: str``, ``seed: int`` and a ``variant`` (field or property); its
fields become columns. A *measure* is a module-level function from a cell to its metrics. How a cell can end:

    ok             its metrics, one row each
    predicted-oom  ``measure`` raised ``PredictedOutOfMemory``: it would not fit, and was not tried
    oom            the allocator refused, or the kernel's out-of-memory killer struck
    unsupported    ``measure`` raised ``Unsupported``
    timeout        it took longer than ``timeout_s`` and was killed
    error          anything else, with the message; the traceback goes to stderr
    interrupted    Ctrl-C; the sweep ends, every finished cell is on disk
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pandas as pd
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cs336_systems.measurement.provenance import device_state, timestamp, versions
from cs336_systems.measurement.record import SCHEMA_VERSION, Metric, Row, RowFile, parse_samples, schema_columns


class Cell(Protocol):
    """What the sweep needs to know of a benchmark's frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def variant(self) -> str: ...


Measure = Callable[[Any], list[Metric]]


_EXIT_GRACE_S = 10.0
"""A process that has reported, or has closed its pipe, may take this long to clean up before it is killed."""


_MESSAGE_WIDTH = 200
"""Characters of an unexpected error that go into its row; the traceback on stderr has the rest."""


class PredictedOutOfMemory(Exception):
    """The cell would need more memory than is free; the message holds both figures."""


class Unsupported(Exception):
    """The device, the build or the library cannot run the cell; the message says why."""


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
    """Run ``measure(cell)`` in a fresh process and return how it ended, rows included; Ctrl-C is an outcome too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(sorted(name for name in sys.modules if name.startswith(("cs336_systems.", "tyro"))))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, measure, cell))
    kills_before = _oom_kills()
    started = time.perf_counter()
    report: dict[str, Any] = {"metrics": []}
    try:
        process.start()
        sender.close()
        _receive(report, receiver, started + timeout_s)
        process.join(_EXIT_GRACE_S)
        if "status" not in report:
            report |= _post_mortem(process.exitcode or 0, _oom_kills() > kills_before)
    except TimeoutError:
        report |= {"status": "timeout", "message": f"took longer than {timeout_s:g} s and was killed"}
    except KeyboardInterrupt:
        report |= {"status": "interrupted", "message": "Ctrl-C"}
    finally:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever the cell has started
            process.kill()
            process.join()
        receiver.close()
    if "traceback" in report:
        print(report["traceback"], file=sys.stderr, end="")
    seconds = time.perf_counter() - started
    outcome = Outcome(cell, report["status"], report["message"], report["metrics"], seconds=seconds)
    outcome.rows = _rows(benchmark, outcome, report)
    return outcome


def _receive(report: dict[str, Any], receiver: Connection, deadline: float) -> None:
    """Merge what the process sends into ``report`` until it has a status or the process is gone.

    Raises:
        TimeoutError: neither happened before the deadline, a value of ``time.perf_counter``.
    """
    with suppress(EOFError):
        while "status" not in report:
            if not receiver.poll(max(0.0, deadline - time.perf_counter())):
                raise TimeoutError
            report |= receiver.recv()


def _post_mortem(exit_code: int, out_of_memory_kill: bool) -> dict[str, str]:
    """Status and message of a process that ended without a report."""
    if exit_code == -signal.SIGKILL and out_of_memory_kill:
        return {"status": "oom", "message": "killed by the kernel's out-of-memory killer"}
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    return {"status": "error", "message": f"the cell's process died without a report: {how}"}


def _oom_kills() -> int:
    """Processes that the kernel's out-of-memory killer has taken since boot; 0 where the kernel does not say."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _child(sender: Connection, measure: Measure, cell: Cell) -> None:
    """Body of the fresh process: say where it runs, measure, say how it went."""
    os.setsid()  # a group of its own, which can be killed as a whole
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with suppress(OSError):  # if memory runs out, this process goes and the sweep stays
        Path("/proc/self/oom_score_adj").write_text("1000")
    device = torch.device(cell.device)
    try:
        sender.send({"provenance": versions(device), "state_before": device_state(device)})
        metrics = measure(cell)
        for metric in metrics:
            metric.statistics()
        report: dict[str, Any] = {"status": "ok", "message": "", "metrics": metrics}
    except BaseException as error:
        report = _classify(error)
    with suppress(Exception):
        report["state_after"] = device_state(device)
    sender.send(report)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)


def _classify(error: BaseException) -> dict[str, Any]:
    """Status and one-line message of what ended a measurement."""
    if isinstance(error, PredictedOutOfMemory):
        return {"status": "predicted-oom", "message": str(error)}
    if isinstance(error, Unsupported):
        return {"status": "unsupported", "message": str(error)}
    message = textwrap.shorten(f"{type(error).__name__}: {error}".splitlines()[0], _MESSAGE_WIDTH, placeholder=" ...")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        return {"status": "oom", "message": message}
    return {"status": "error", "message": message, "traceback": traceback.format_exc()}


def _rows(benchmark: str, outcome: Outcome, report: dict[str, Any]) -> list[Row]:
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
) -> Iterator[Outcome]:
    """Run every cell in turn; yield its outcome, then write its rows, before the next one starts. Ctrl-C is the last.

    Args:
        row_file: where rows are appended; None keeps them in memory only.
        describe: a short name of a cell for the progress display.
        cost: what a cell should cost, in any unit; the remaining time is extrapolated by cost, not by count.
        console: where progress goes; on anything but a terminal, one plain line per finished cell.

    Raises:
        OSError: the rows of the outcome yielded last could not be written; all earlier ones are on disk.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    costs = [cost(cell) for cell in cells]
    started = time.perf_counter()
    with progress:
        task = progress.add_task("", total=sum(costs), left="")
        for i, cell in enumerate(cells):
            place = f"[{i + 1}/{len(cells)}] {describe(cell)}"
            progress.update(task, description=place)
            outcome = run_cell(benchmark, measure, cell, timeout_s)
            yield outcome
            if row_file is not None:
                row_file.append(outcome.rows)
            note = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
            console.print(f"{place}: {note} ({outcome.seconds:.1f} s)", markup=False, highlight=False, soft_wrap=True)
            if outcome.status == "interrupted":
                return
            seconds_left = (time.perf_counter() - started) / sum(costs[: i + 1]) * sum(costs[i + 1 :])
            progress.update(task, advance=costs[i], left=f"about {timedelta(seconds=round(seconds_left))} left")
