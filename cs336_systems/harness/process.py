"""A fresh process that measures cells and survives nothing: the unit of isolation under every sweep.

A process of its own means that no cell inherits another's memory, caches, compiled code or broken CUDA context, and
that a cell which is killed, hangs or runs out of memory costs only itself. Processes are forked from a server that has
imported the libraries but touched no device. A *measure* is a module-level function from a cell to its metrics; how
it ends is the cell's status:

    ok             its metrics
    predicted-oom  it raised ``PredictedOutOfMemory``: the cell would not fit, and was not tried
    oom            the allocator refused, or the kernel's out-of-memory killer struck
    unsupported    it raised ``Unsupported``
    timeout        it took too long and was killed
    error          anything else, with the message; the traceback goes to stderr
    interrupted    Ctrl-C in the parent
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from cs336_systems.case import Unsupported
from cs336_systems.harness.provenance import device_state, versions
from cs336_systems.harness.record import Metric


class Cell(Protocol):
    """What a measurement needs to know of a benchmark's frozen dataclass; its fields become columns."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def variant(self) -> str: ...


Measure = Callable[[Any], list[Metric]]

Report = dict[str, Any]
"""``status``, ``message``, ``metrics``, and what is known of ``provenance``, ``state_before``, ``state_after``."""

_PRELOADED = ("torch._dynamo",)
"""Imported by every optimizer's constructor, and slow: three seconds a cell unless the server has done it once."""

_EXIT_GRACE_S = 10.0
"""A process without further work may take this long to clean up before it is killed."""

_CUDA_OUT_OF_MEMORY = re.compile(
    r"Tried to allocate (\S+ \S+)\. .* total capacity of (\S+ \S+) of which .*"
    r"Of the allocated memory (\S+ \S+) is allocated by PyTorch, and (\S+ \S+) is reserved by PyTorch but unallocated",
    re.DOTALL,
)
"""What torch's allocator says of itself."""

_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How errors of other types say that memory has run out."""

_MESSAGE_WIDTH = 200
"""Characters of an unexpected error that go into its row; the traceback on stderr has the rest."""


class PredictedOutOfMemory(Exception):
    """The cell would need more memory than is free; the message holds both figures."""


class CellProcess:
    """One fresh process, started by the first ``run``; cheap cells may share it, one after another.

    ``usable`` turns false when a cell has left it in doubt (timeout, error, death, Ctrl-C); it is then gone.
    """

    def __init__(self, measure: Measure) -> None:
        context = multiprocessing.get_context("forkserver")
        ours = sorted(name for name in sys.modules if name.startswith(("cs336_systems.", "tyro")))
        context.set_forkserver_preload([*ours, *_PRELOADED])
        self._connection, self._far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._far_end, measure))
        self.usable = True

    def run(self, cell: Cell, timeout_s: float) -> Report:
        """Measure one cell and report how it ended, Ctrl-C included."""
        deadline = time.perf_counter() + timeout_s
        kills_before = _oom_kills()
        report: Report = {"metrics": []}
        try:
            if self._process.pid is None:
                self._process.start()
                self._far_end.close()
            _converse(report, self._connection, cell, deadline)
            if "status" not in report:
                self._process.join(_EXIT_GRACE_S)
                report |= _post_mortem(self._process.exitcode or 0, _oom_kills() > kills_before)
        except TimeoutError:
            report |= {"status": "timeout", "message": f"took longer than {timeout_s:g} s and was killed"}
        except KeyboardInterrupt:
            report |= {"status": "interrupted", "message": "Ctrl-C"}
        if report["status"] in ("timeout", "error", "interrupted"):
            self._kill()
        if "traceback" in report:
            print(report["traceback"], file=sys.stderr, end="")
        return report

    def close(self) -> None:
        """Let the process end by itself, then make sure of it and of whatever its cells have started."""
        self._connection.close()
        if self.usable and self._process.pid is not None:
            self._process.join(_EXIT_GRACE_S)
        self._kill()

    def _kill(self) -> None:
        self.usable = False
        if self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


def _converse(report: Report, connection: Connection, cell: Cell, deadline: float) -> None:
    """Hand over the cell and merge what comes back into ``report`` until it has a status or the process is gone.

    Raises:
        TimeoutError: neither happened before the deadline, a value of ``time.perf_counter``.
    """
    with suppress(EOFError, ConnectionError):
        connection.send(cell)
        while "status" not in report:
            if not connection.poll(max(0.0, deadline - time.perf_counter())):
                raise TimeoutError
            report |= connection.recv()


def _post_mortem(exit_code: int, out_of_memory_kill: bool) -> Report:
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


def _serve(connection: Connection, measure: Measure) -> None:
    """Body of the fresh process: measure what arrives until the parent hangs up."""
    os.setsid()  # a group of its own, which can be killed as a whole
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with suppress(OSError):  # if memory runs out, this process goes and the sweep stays
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(EOFError):
        while True:
            _measure(connection, measure, connection.recv())


def _measure(connection: Connection, measure: Measure, cell: Cell) -> None:
    """Say where it runs, measure, say how it went, leave nothing behind."""
    device = torch.device(cell.device)
    try:
        connection.send({"provenance": versions(device), "state_before": device_state(device)})
        metrics = measure(cell)
        for metric in metrics:
            metric.statistics()
        report: Report = {"status": "ok", "message": "", "metrics": metrics}
    except BaseException as error:
        report = classify(error)
    with suppress(Exception):
        report["state_after"] = device_state(device)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    connection.send(report)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)


def classify(error: BaseException) -> Report:
    """Status and one-line message of what ended a measurement."""
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
