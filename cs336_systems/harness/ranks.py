"""Measurements that several ranks make together: steps as slow as the slowest rank, and sweeps over worlds.

Without a launcher a sweep starts the ranks itself, every cell in fresh processes, so a cell that fails, hangs or is
killed on any rank costs only itself. Under torchrun the ranks are there already and run one cell after another. There
a cell that raises is a row, and the ranks leave their group and join a new one for the next cell. If a rank raises and
another does not hear of it within ``_AGREEMENT_GRACE_S`` (NCCL's waiting kernels do not see that a peer has left), the
row is written and the run ends; so it does, without a row, when a rank is killed, for torchrun then ends the others.

    outcomes = run_ranked_sweep("benchmark_ddp", cells, measure, device=options.device, ...)
    if not reports():
        return 0                                   # torchrun: rank 0 alone has outcomes, prints and writes
"""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from cs336_systems.distributed.process_group import (
    PEER_LOST_HOLD_S,
    Rank,
    RankFailed,
    check_same_across_ranks,
    is_peer_lost,
    joined,
    launched_world_size,
    launcher_store,
    spawn,
)
from cs336_systems.harness.clock import WHOLE, PhaseTimes, time_phases
from cs336_systems.harness.process import Cell, Report, classify
from cs336_systems.harness.provenance import device_state, versions
from cs336_systems.harness.record import Metric, RowFile
from cs336_systems.harness.sweep import Outcome, make_rows

_AGREEMENT_GRACE_S = 30.0
"""How long a rank whose cell has failed waits to hear that the cell has ended on the others too."""


class RankedCell(Cell, Protocol):
    """A cell that says how many ranks it takes."""

    @property
    def world_size(self) -> int: ...


MeasureRanked = Callable[[Any, Rank], list[Metric]]


def reports() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or the only process there is so far."""
    return os.environ.get("RANK", "0") == "0"


def resolve_world_sizes(requested: tuple[int, ...] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """The launcher's world size; without a launcher those of ``--world-size``, else the default ones.

    Raises:
        ValueError: the launcher has started another number of ranks than requested, or described none properly; or the
            request is empty or not positive.
    """
    present = launched_world_size()
    if requested is not None:
        if not requested:
            raise ValueError("--world-size needs at least one value, got none")
        if min(requested) < 1:
            raise ValueError(f"--world-size must be positive, got {min(requested)}")
        if present is not None and requested != (present,):
            raise ValueError(f"--world-size {' '.join(map(str, requested))}: the launcher has started {present} ranks")
    if present is not None:
        return (present,)
    return default if requested is None else requested


def one_rank_per_gpu(device: str) -> tuple[int]:
    """The usual world on this machine: all its GPUs, or two ranks on a CPU."""
    return (torch.cuda.device_count() if device == "cuda" else 2,)


def time_phases_of_ranks(
    phases: Mapping[str, Callable[[], None]], rank: Rank, *, warmup: int, steps: int
) -> PhaseTimes:
    """``time_phases`` on all ranks at once; each sample is that of the slowest rank, the same on every rank.

    Steps begin together, after a barrier that no sample holds. The maximum is taken for each phase and for the whole
    step by itself, so phases whose slowest ranks differ add up to more than the step.

    Raises:
        ValueError: the ranks disagree about phases, ``warmup`` or ``steps``, or as ``time_phases``.
    """
    names = [*phases, WHOLE]
    check_same_across_ranks([*names, warmup, steps], "phases and step counts")
    if warmup < 0 or steps < 1:
        raise ValueError(f"warmup must be at least 0 and steps at least 1, got {warmup} and {steps}")
    laps_ms: list[list[float]] = []
    for _ in range(warmup + steps):
        dist.barrier()
        step = time_phases(phases, device=rank.device, warmup=0, steps=1).samples_ms
        laps_ms.append([step[name][0] for name in names])
    slowest = torch.tensor(laps_ms, dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    columns = slowest.T.tolist()
    samples = {name: column[warmup:] for name, column in zip(names, columns, strict=True)}
    return PhaseTimes(samples, columns[-1][:warmup])


def run_ranked_sweep(
    benchmark: str,
    cells: Sequence[RankedCell],
    measure: MeasureRanked,
    *,
    device: str,
    row_file: RowFile | None,
    timeout_s: float,
    describe: Callable[[Any], str],
) -> list[Outcome]:
    """Run every cell on its ranks; rank 0's metrics become rows, written before the next cell starts.

    Args:
        measure: a module-level function, run on every rank; it reduces over ranks what has to be reduced.
        row_file: of the process that ``reports``; None on the others.
        timeout_s: how long a collective may wait and, without a launcher, how long a cell may take.

    Returns:
        One outcome per cell, up to an interruption (Ctrl-C); nothing on ranks other than 0 of a launcher.

    Raises:
        ValueError: a launcher has described its ranks badly, or the device is not there.
        RankFailed: under a launcher, a cell has failed on this rank but not on all: its row is written.
    """
    sweep = _Sweep(benchmark, cells, measure, device, row_file, timeout_s, describe)
    if launched_world_size() is None:
        return _run_in_spawned_ranks(sweep)
    return record(_run_as_a_rank)(sweep) or []  # torchrun shows the error of the rank that failed first


@dataclass
class _Sweep:
    """What a sweep runs, and the outcomes that it has so far: those of the first ``len(outcomes)`` cells."""

    benchmark: str
    cells: Sequence[RankedCell]
    measure: MeasureRanked
    device: str
    row_file: RowFile | None
    timeout_s: float
    describe: Callable[[Any], str]
    outcomes: list[Outcome] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cell(self) -> RankedCell | None:
        """The one to measure next."""
        return self.cells[len(self.outcomes)] if len(self.outcomes) < len(self.cells) else None

    def keep(self, report: Report) -> None:
        """Make the report the outcome of the present cell: a row on disk, and a line for who waits for it."""
        with self.lock:
            assert self.cell is not None
            now = time.perf_counter()
            outcome = Outcome(
                self.cell, report["status"], report["message"], report["metrics"], seconds=now - self.started
            )
            outcome.rows = make_rows(self.benchmark, outcome, report)
            self.outcomes.append(outcome)
            self.started = now
            if not reports():
                return
            if self.row_file is not None:
                self.row_file.append(outcome.rows)
            place = f"[{len(self.outcomes)}/{len(self.cells)}] {self.describe(outcome.cell)}"
            note = f"{outcome.status}: {outcome.message}" if outcome.message else outcome.status
            print(f"{place}: {note} ({outcome.seconds:.1f} s)", file=sys.stderr, flush=True)


class _CellFailed(Exception):
    """Carries the report of a cell from the rank on which it failed."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report["message"])


class _FailedElsewhere(_CellFailed):
    """The cell has gone well on this rank, but not on another one, whose report this is."""


def _run_in_spawned_ranks(sweep: _Sweep) -> list[Outcome]:
    while (cell := sweep.cell) is not None:
        sweep.keep(_spawned_report(sweep, cell))
        if sweep.outcomes[-1].status == "interrupted":
            break
    return sweep.outcomes


def _spawned_report(sweep: _Sweep, cell: RankedCell) -> Report:
    """How a cell ended on ranks of its own."""
    limit_s = sweep.timeout_s
    try:
        arguments = (sweep.measure, cell)
        return spawn(_report, cell.world_size, *arguments, device=sweep.device, timeout_s=limit_s, limit_s=limit_s)[0]
    except RankFailed as failure:
        if isinstance(failure.error, _CellFailed):
            return failure.error.report
        print(failure, file=sys.stderr)
        message = classify(failure.error)["message"] if failure.error else str(failure).splitlines()[0]
        return _bare_report("error", message)
    except ValueError as error:
        return _bare_report("unsupported", str(error))
    except TimeoutError:
        return _bare_report("timeout", f"took longer than {limit_s:g} s and was killed")
    except KeyboardInterrupt:
        return _bare_report("interrupted", "Ctrl-C")


def _bare_report(status: str, message: str) -> Report:
    """The report of a cell that no rank has reported; the CPU's provenance, as no device was reached."""
    return {"status": status, "message": message, "metrics": [], "provenance": versions(torch.device("cpu"))}


def _report(rank: Rank, measure: MeasureRanked, cell: RankedCell) -> Report:
    """Measure one cell on this rank and say where it ran and how it went.

    Raises:
        _CellFailed: it went wrong; the exception holds the report.
    """
    provenance = versions(rank.device)
    if rank.device.type == "cuda":
        provenance["gpu_count"] = rank.world_size
    report: Report = {"metrics": [], "provenance": provenance, "state_before": device_state(rank.device)}
    cause = None
    try:
        metrics = measure(cell, rank)
        for metric in metrics:
            metric.statistics()
        report |= {"status": "ok", "message": "", "metrics": metrics}
    except Exception as error:
        report |= classify(error) | {"peer_lost": is_peer_lost(error)}
        if "traceback" in report and not (report["peer_lost"] and rank.backend == "gloo"):  # the peer says more
            print(f"rank {rank.rank}: {report.pop('traceback')}", file=sys.stderr, end="")
        cause = error
    with suppress(Exception):
        report["state_after"] = device_state(rank.device)
    gc.collect()
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()
    if cause is not None:
        raise _CellFailed(report) from cause
    return report


def _run_as_a_rank(sweep: _Sweep) -> list[Outcome]:
    """Measure the cells in the launcher's processes, in one group until a cell fails, then in another one."""
    with _row_of_an_abandoned_cell(sweep):
        while sweep.cell is not None:
            try:
                with joined(sweep.device, timeout_s=sweep.timeout_s) as rank:
                    while (cell := sweep.cell) is not None:
                        if cell.world_size != rank.world_size:
                            message = f"takes {cell.world_size} ranks, the launcher has started {rank.world_size}"
                            sweep.keep(_bare_report("unsupported", message))
                            continue
                        report = _agree(sweep, _report(rank, sweep.measure, cell))
                        if report["status"] != "ok":
                            raise _FailedElsewhere(report)
                        sweep.keep(report)
            except _FailedElsewhere as failure:
                sweep.keep(failure.report)
            except _CellFailed as failure:  # the group is left: who waits for this rank in a collective hears of it
                sweep.keep(_agree(sweep, failure.report))
    return sweep.outcomes if reports() else []


def _agree(sweep: _Sweep, report: Report) -> Report:
    """This rank's report, once the cell has ended on all ranks; if it failed on some, as the first of them tells it.

    The first is the lowest rank among those that failed by themselves and not for having lost a peer. Ranks talk
    through the launcher's store, which works when a collective would not.

    Raises:
        RankFailed: it has not ended everywhere in time; rank 0 is told to write the row.
    """
    store, prefix = launcher_store(), f"sweep/{len(sweep.outcomes)}/"
    own, world_size = int(os.environ["RANK"]), launched_world_size() or 1
    keys = [f"{prefix}{number}" for number in range(world_size)]
    store.set(keys[own], json.dumps([report["status"], report["message"], report.get("peer_lost", False)]))
    failed = report["status"] != "ok"
    with suppress(dist.DistStoreError):
        store.wait(keys, timedelta(seconds=_AGREEMENT_GRACE_S if failed else sweep.timeout_s))
    ended = {number: json.loads(store.get(key)) for number, key in enumerate(keys) if store.check([key])}
    failures = [(lost, number) for number, (status, _, lost) in ended.items() if status != "ok"]
    if failures:
        _, first = min(failures)
        status, message, _ = ended[first]
        report |= {"status": status, "message": f"rank {first}: {message}", "metrics": []}
    if len(ended) == world_size:
        return report
    silent = ", ".join(str(number) for number in range(world_size) if number not in ended)
    message = f"{report['message']}; ranks {silent} have not ended the cell, and the run ends here".removeprefix("; ")
    store.set(_OVER, message)
    time.sleep(PEER_LOST_HOLD_S)  # rank 0 writes, before a launcher that sees this rank end also ends that one
    raise RankFailed(own, message)


_OVER = "sweep/over"
"""Key in the launcher's store: empty when the sweep has ended, else why it cannot go on."""


@contextmanager
def _row_of_an_abandoned_cell(sweep: _Sweep) -> Iterator[None]:
    """On rank 0, write the cell's row when another rank gives up, even while this one is stuck in a collective."""
    if not reports():
        yield
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_store(timedelta(seconds=sweep.timeout_s))  # hosts it, if the launcher does not
    own = dist.TCPStore(address, port, is_master=False)  # a wait on a store bars its other users

    def watch() -> None:
        own.wait([_OVER], timedelta(days=100))
        if message := own.get(_OVER).decode():
            sweep.keep(_bare_report("error", message))
            time.sleep(2 * PEER_LOST_HOLD_S)  # the rank that gave up ends first: its error is the one to report
            os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    launcher_store().set(_OVER, "")
    watcher.join()
