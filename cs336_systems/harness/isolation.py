"""Measures each cell in a fresh process; how that ends is the cell's status.

A fresh process inherits no other cell's memory, caches, compiled code or broken CUDA context, and a cell that is
killed, hangs or runs out of memory costs only itself. A *measure* is a module-level function from a cell to its
metrics; how it ends is the cell's status:

    ok             it returned metrics
    predicted-oom  it raised ``PredictedOutOfMemory``: the cell would not fit, and was not tried
    oom            the allocator refused, or the kernel's out-of-memory killer struck
    unsupported    it raised ``Unsupported``
    timeout        it took too long and was killed
    error          anything else, with the message; the traceback goes to stderr
    interrupted    Ctrl-C in the parent

A cell without a ``world_size`` is measured by one fresh process, any other by as many ranks. This process starts them
all, or, if a launcher such as torchrun has started it, the one rank of its own number; the launcher's processes then
agree through its store on how each cell has ended. So a rank that raises, hangs or is killed is a row in both cases,
and the grid goes on. A process of the launcher that dies itself ends the command, whose rows are kept.

Processes may be reused for the next cell until a cell fails in them. Importing this module imports no torch.
"""

import functools
import gc
import itertools
import multiprocessing.connection
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from cs336_systems.case import Unsupported
from cs336_systems.harness.launcher import Launcher
from cs336_systems.harness.provenance import device_state, versions
from cs336_systems.harness.record import Metric
from cs336_systems.processes import EXIT_GRACE_S, Died, FreshProcess

if TYPE_CHECKING:
    import torch


class Cell(Protocol):
    """A benchmark's frozen dataclass as a measurement knows it; its fields become columns.

    A cell that several ranks measure together has a ``world_size`` as well.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def variant(self) -> str: ...


Measure = Callable[..., list[Metric]]
"""``measure(cell)``, or ``measure(cell, rank)`` if the cell has a ``world_size``."""

Report = dict[str, Any]
"""``status``, ``message``, ``metrics``, ``provenance``, and what is known of ``state_before`` and ``state_after``."""

_CUDA_OUT_OF_MEMORY = re.compile(
    r"Tried to allocate (\S+ \S+)\. .* total capacity of (\S+ \S+) of which .*"
    r"Of the allocated memory (\S+ \S+) is allocated by PyTorch, and (\S+ \S+) is reserved by PyTorch but unallocated",
    re.DOTALL,
)
"""The message of torch's CUDA allocator, whose four amounts a row repeats."""

_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How errors of other types say that memory has run out."""

_MESSAGE_WIDTH = 200
"""Characters of an unexpected error that go into its row; the traceback on stderr has the rest."""

_POLL_S = 1.0
"""Seconds between a launcher's process asking whether a cell has failed on another rank, while its own is at work."""


class PredictedOutOfMemory(Exception):
    """The cell would need more memory than is free; the message holds both figures."""


def reports() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or the only process there is so far."""
    return os.environ.get("RANK", "0") == "0"


def isolated(
    cells: Sequence[Cell], measure: Measure, timeout_s: float, share: Callable[[Any], Hashable] | None
) -> Generator[Report, None, None]:
    """Measure the cells in turn and yield how each has ended; arguments and errors are those of ``run_sweep``."""
    from cs336_systems.distributed.process_group import launched

    launcher = Launcher(timeout_s) if launched() and cells and hasattr(cells[0], "world_size") else None
    team = _Team(measure, timeout_s, launcher)
    try:
        for cell, following in itertools.zip_longest(cells, cells[1:]):
            report: Report = {"metrics": []}
            try:
                team.measure(cell, report)
            except Unsupported as error:
                report |= {"status": "unsupported", "message": str(error)}
            except TimeoutError:
                report |= {"status": "timeout", "message": f"took longer than {timeout_s:g} s and was killed"}
            except KeyboardInterrupt:
                report |= {"status": "interrupted", "message": "Ctrl-C"}
            if launcher is not None and report["status"] != "interrupted":
                launcher.agree(report)
            in_doubt = report["status"] in ("timeout", "error", "interrupted", "oom")  # the last may keep its memory
            in_doubt |= report["status"] != "ok" and hasattr(cell, "world_size")  # ranks have left their group
            if in_doubt or not team.may_measure(following, cell, share):
                team.end(grace_s=0.0 if in_doubt else EXIT_GRACE_S)
            print(report.pop("traceback", ""), file=sys.stderr, end="")
            report.setdefault("provenance", versions("cpu"))  # no process has told where it runs
            yield report
    finally:
        team.end()


class _Team:
    """The fresh processes that this process has started to measure a cell: one, some ranks, or none for now."""

    def __init__(self, measure: Measure, timeout_s: float, launcher: Launcher | None) -> None:
        self._measure = measure
        self._timeout_s = timeout_s
        self._launcher = launcher
        self._processes: dict[int, FreshProcess] = {}
        """The processes by rank; a process that joins no group has the key 0."""

    def measure(self, cell: Any, report: Report) -> None:
        """Measure one cell; ``report`` is called with the report of rank 0, or of the first rank that fails.

        Provenance comes from rank 0, or from the first rank that sent it, as another may die before rank 0 has.

        Raises:
            Unsupported: the launcher has started another number of ranks, or this machine is too small for so many.
            TimeoutError: it took longer than the time-out.
        """
        deadline = time.monotonic() + self._timeout_s
        if self._launcher and cell.world_size != self._launcher.world_size:
            raise Unsupported(f"takes {cell.world_size} ranks, the launcher has started {self._launcher.world_size}")
        if not self._processes:
            for number, place in self._places(cell).items():
                self._processes[number] = FreshProcess(_serve, self._measure, cell.device, self._timeout_s, place)
        for process in self._processes.values():
            with suppress(ConnectionError):  # if it has died, receiving from it says how
                process.connection.send(cell)
        ended: dict[int, Report] = {}
        while len(ended) < len(self._processes):
            number, said = self._next_word(self._processes.keys() - ended.keys(), deadline, hasattr(cell, "world_size"))
            if said.get("status", "ok") != "ok":
                report.update(said)
                return
            if "status" in said:
                ended[number] = said
            elif number == 0 or "provenance" not in report:
                report.update(said)
        report.update(ended[min(ended)])

    def _places(self, cell: Any) -> dict[int, dict[str, str] | None]:
        """The variables of each process to start, by rank; None for one that joins no group."""
        if not hasattr(cell, "world_size"):
            return {0: None}
        if self._launcher is not None:
            return {self._launcher.rank: self._launcher.place_of_a_new_rank()}
        from torch.distributed import TCPStore

        from cs336_systems.distributed.process_group import check_device, rank_variables

        check_device(cell.device, cell.world_size)
        self._store = TCPStore("127.0.0.1", 0, cell.world_size, is_master=True, wait_for_workers=False)
        return {number: rank_variables(number, cell.world_size, self._store.port) for number in range(cell.world_size)}

    def _next_word(self, numbers: Collection[int], deadline: float, ranked: bool) -> tuple[int, Report]:
        """The number of a rank and its next report, or the report of its death."""
        waiting: dict[Any, int] = {self._processes[number].connection: number for number in numbers}
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), min(left, _POLL_S) if self._launcher else left)
            if ready:
                break
            if left == 0.0:
                raise TimeoutError
            if self._launcher and self._launcher.has_failed():
                return min(numbers), {"status": "error", "message": "another rank has failed", "peer_lost": True}
        number = waiting[ready[0]]
        try:
            return number, self._processes[number].receive()
        except Died as death:
            message = f"rank {number} {death}" if ranked else str(death)
            if death.out_of_memory:
                return number, {"status": "oom", "message": message}
            return number, {"status": "error", "message": message if ranked else f"the cell's process {message}"}

    def may_measure(self, cell: Any, previous: Any, share: Callable[[Any], Hashable] | None) -> bool:
        """Whether the processes that have measured ``previous`` are to measure ``cell`` (None after the last), too."""
        if cell is None or not all(process.is_alive() for process in self._processes.values()):
            return False
        if self._launcher is not None:
            return True
        same_world = getattr(cell, "world_size", None) == getattr(previous, "world_size", None)
        return share is not None and same_world and share(cell) == share(previous)

    def end(self, grace_s: float = 0.0) -> None:
        """End all processes, which have so long to do it themselves; the next cell starts others."""
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.connection.close()  # all ranks leave their group together
        for process in processes:
            process.end(grace_s)


def _serve(
    connection: Connection, measure: Measure, device: str, timeout_s: float, place: dict[str, str] | None
) -> None:
    """Body of a fresh process: measure cells until the parent closes the pipe, or until a cell fails on a rank.

    A rank reports a failure once it has left its group and, if it only lost a peer, a little later than that peer.
    """
    import torch

    from cs336_systems.distributed.process_group import is_peer_lost, joined, take_place

    if place is None:
        for cell in _arriving(connection):
            report, _ = _measure_here(cell, torch.device(device), functools.partial(measure, cell), connection)
            connection.send(report)
        return
    take_place(place)
    failure: Report | None = None
    try:
        with joined(device, timeout_s=timeout_s) as rank:
            for cell in _arriving(connection):
                report, error = _measure_here(cell, rank.device, functools.partial(measure, cell, rank), connection)
                if error is not None:
                    failure = report
                    raise error
                connection.send(report)
    except (Exception, SystemExit) as error:
        who, report = f"rank {place['RANK']}: ", failure or classify(error)
        if report["status"] in ("error", "oom") and place["WORLD_SIZE"] != "1":
            report["message"] = who + report["message"]
        if "traceback" in report:
            report["traceback"] = who + report["traceback"]
        with suppress(ConnectionError):  # the parent has hung up: it wants no more
            connection.send(report | {"peer_lost": is_peer_lost(error)})


def _arriving(connection: Connection) -> Iterator[Any]:
    """Cells, until the parent hangs up."""
    with suppress(EOFError):
        while True:
            yield connection.recv()


def _measure_here(
    cell: Any, device: "torch.device", measure: Callable[[], list[Metric]], connection: Connection
) -> tuple[Report, BaseException | None]:
    """Tell the parent where the cell runs, measure it and free its memory; returns the report, and what was raised."""
    import torch

    from cs336_systems.harness.memory import mark_used

    raised: BaseException | None = None
    try:
        provenance = versions(device)
        if device.type == "cuda":
            provenance["gpu_count"] = getattr(cell, "world_size", 1)
        connection.send({"provenance": provenance, "state_before": device_state(device)})
        metrics = measure()
        for metric in metrics:
            metric.statistics()
        report: Report = {"status": "ok", "message": "", "metrics": metrics}
    except (Exception, SystemExit) as error:
        report, raised = classify(error), error
    with suppress(Exception):
        report["state_after"] = device_state(device)
    mark_used()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return report, raised


def classify(error: BaseException) -> Report:
    """Status and one-line message of what ended a measurement."""
    import torch

    if isinstance(error, PredictedOutOfMemory):
        return {"status": "predicted-oom", "message": str(error)}
    if isinstance(error, Unsupported):
        return {"status": "unsupported", "message": str(error)}
    if found := _CUDA_OUT_OF_MEMORY.search(str(error)):
        asked, whole, allocated, cached = found.groups()
        message = f"asked for {asked} of {whole}, {allocated} in tensors and {cached} in free pieces too small"
        return {"status": "oom", "message": message}
    message = textwrap.shorten(f"{type(error).__name__}: {error}".splitlines()[0], _MESSAGE_WIDTH, placeholder=" ...")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        return {"status": "oom", "message": message}
    return {"status": "error", "message": message, "traceback": traceback.format_exc()}
