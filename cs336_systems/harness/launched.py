"""A sweep on the ranks of a launcher, which exist already and measure one cell after another.

A cell that raises is a row, and the ranks leave their group and join a new one for the next cell. If a rank raises and
another does not hear of it within ``_AGREEMENT_GRACE_S`` (NCCL's waiting kernels do not see that a peer has left), the
row is written and the run ends; so it does, without a row, when a rank is killed, for torchrun then ends the others.
"""

import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cs336_systems.distributed.process_group import PEER_LOST_HOLD_S, Rank, joined, launched_world_size, launcher_store
from cs336_systems.distributed.spawn import RankFailed
from cs336_systems.harness.memory import mark_used
from cs336_systems.harness.process import Measure, Report, blank_report
from cs336_systems.harness.ranks import CellFailed, measure_as_rank, reports

_AGREEMENT_GRACE_S = 30.0
"""How long a rank whose cell has failed waits to hear that the cell has ended on the others too."""

_sweeps = itertools.count()
"""Sweeps of this process: a later one must not read what an earlier one has left in the launcher's store."""


class _FailedElsewhere(CellFailed):
    """The cell has gone well on this rank, but not on another one, whose report this is."""


class LaunchedSweep:
    """One rank's part in measuring the cells; ``keep`` is called with the report of each, as soon as it has ended."""

    def __init__(
        self, cells: Sequence[Any], measure: Measure, timeout_s: float, keep: Callable[[Report], None]
    ) -> None:
        self._cells = deque(cells)
        self._measure = measure
        self._timeout_s = timeout_s
        self._tell_caller = keep
        self._lock = threading.Lock()
        self._prefix = f"sweep {next(_sweeps)}/"
        self._over = f"{self._prefix}over"
        """Key in the launcher's store: empty when the sweep has ended, else why it cannot go on."""
        mark_used()

    def _keep(self, report: Report) -> None:
        with self._lock:
            self._tell_caller(report)
            self._cells.popleft()

    def run(self) -> None:
        """Measure the cells in one group until one fails, then in another one.

        Raises:
            RankFailed: a cell has failed on this rank but not on all: its row is written.
        """
        with self._row_of_an_abandoned_cell():
            while self._cells:
                try:
                    with joined(self._cells[0].device, timeout_s=self._timeout_s) as rank:
                        while self._cells:
                            self._keep(self._report(rank))
                except _FailedElsewhere as failure:
                    self._keep(failure.report)
                except CellFailed as failure:  # the group is left: who waits for this rank in a collective hears of it
                    self._keep(self._agree(failure.report))

    def _report(self, rank: Rank) -> Report:
        """What all ranks say of the present cell.

        Raises:
            CellFailed: it went wrong here or elsewhere.
        """
        cell = self._cells[0]
        if cell.world_size != rank.world_size:
            message = f"takes {cell.world_size} ranks, the launcher has started {rank.world_size}"
            return blank_report() | {"status": "unsupported", "message": message}
        known: Report = {"metrics": []}
        try:
            report = known | measure_as_rank(rank, self._measure, cell, tell=known.update)
        except CellFailed as failure:
            failure.report |= known | failure.report
            traceback = failure.report.pop("traceback", "")
            if not (failure.report["peer_lost"] and rank.backend == "gloo"):  # the peer says more
                print(traceback, file=sys.stderr, end="")
            raise
        report = self._agree(report)
        if report["status"] != "ok":
            raise _FailedElsewhere(report)
        return report

    def _agree(self, report: Report) -> Report:
        """This rank's report, once the cell has ended on all ranks; if it failed on some, as the first of them tells.

        The first is the lowest rank among those that failed by themselves and not for having lost a peer. Ranks talk
        through the launcher's store, which works when a collective would not.

        Raises:
            RankFailed: it has not ended everywhere in time; rank 0 is told to write the row.
        """
        store, prefix = launcher_store(), f"{self._prefix}{len(self._cells)} to go/"
        own, world_size = int(os.environ["RANK"]), launched_world_size() or 1
        keys = [f"{prefix}{number}" for number in range(world_size)]
        store.set(keys[own], json.dumps([report["status"], report["message"], report.get("peer_lost", False)]))
        failed = report["status"] != "ok"
        with suppress(dist.DistStoreError):
            store.wait(keys, timedelta(seconds=_AGREEMENT_GRACE_S if failed else self._timeout_s))
        ended = {number: json.loads(store.get(key)) for number, key in enumerate(keys) if store.check([key])}
        failures = [(lost, number) for number, (status, _, lost) in ended.items() if status != "ok"]
        if failures:
            _, first = min(failures)
            status, message, _ = ended[first]
            report |= {"status": status, "message": f"rank {first}: {message}", "metrics": []}
        if len(ended) == world_size:
            return report
        silent = ", ".join(str(number) for number in range(world_size) if number not in ended)
        message = f"{report['message']}; ranks {silent} have not ended the cell, and the run ends here"
        store.set(self._over, message.removeprefix("; "))
        time.sleep(PEER_LOST_HOLD_S)  # rank 0 writes, before a launcher that sees this rank end also ends that one
        raise RankFailed(own, message.removeprefix("; "))

    @contextmanager
    def _row_of_an_abandoned_cell(self) -> Iterator[None]:
        """On rank 0, write the cell's row when another rank gives up, even while this one is stuck in a collective."""
        if not reports():
            yield
            return
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        launcher_store(timedelta(seconds=self._timeout_s))  # hosts it, if the launcher does not
        own = dist.TCPStore(address, port, is_master=False)  # a wait on a store bars its other users

        def watch() -> None:
            own.wait([self._over], timedelta(days=100))
            if message := own.get(self._over).decode():
                self._keep(blank_report() | {"status": "error", "message": message})
                time.sleep(2 * PEER_LOST_HOLD_S)  # the rank that gave up ends first: its error is the one to report
                os._exit(1)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        yield
        launcher_store().set(self._over, "")
        watcher.join()
