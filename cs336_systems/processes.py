"""Fresh processes: forked from a server that has imported the libraries and touched no device, and isolated from there.

    start_server("cs336_systems.training")   # optional: it imports while this process does too
    process = FreshProcess(body, argument)                     # body(connection, argument), a module-level function
    process.connection.send(...)
    process.receive(deadline)                                  # what the body has sent; how it died, if it did
    process.end()                                              # and everything that it has started

A fresh process leads its own process group, which is killed as a whole and does not receive signals to its parent's
group, such as the terminal's Ctrl-C; neither does the server. It dies with its parent, and is the first that the
kernel's out-of-memory killer ends. This module imports no torch, so that the server can start before anything slow is
imported.
"""

import atexit
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

_context = multiprocessing.get_context("forkserver")

_OF_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that a terminal or a service manager sends to a whole group: this process alone decides what they mean."""
_PR_SET_PDEATHSIG = 1
"""The constant of ``linux/prctl.h``."""

EXIT_GRACE_S = 10.0
"""A process without further work may take this long to clean up before it is killed."""


def n_cores() -> int:
    """Cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Died(Exception):
    """A process has ended, or hung up, without a report; the message says how."""

    def __init__(self, how: str, *, out_of_memory: bool = False) -> None:
        super().__init__(how)
        self.out_of_memory = out_of_memory


def start_server(*modules: str) -> None:
    """Start the fork server, which imports the modules, and ``frozen`` last, in the background; while it runs, further
    calls do nothing.

    Args:
        modules: by default those of this package that are imported here, and ``torch._dynamo``, which the constructor
            of every torch optimizer would import, in seconds.
    """
    ours = sorted(name for name in sys.modules if name.startswith("cs336_systems."))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_PARENT)  # which those that are started inherit
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_PARENT)  # it has unblocked some
        _context.set_forkserver_preload([*(modules or (*ours, "torch._dynamo")), "cs336_systems.frozen"])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class FreshProcess:
    """A process that runs ``body(connection, *args)``, a module-level function."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        self._kills_before = _oom_kills()
        start_server()
        self.connection, theirs = _context.Pipe()
        self._process: BaseProcess = _context.Process(target=_run, args=(theirs, body, args))
        self._process.start()
        theirs.close()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, if it is alive."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def receive(self, deadline: float | None = None) -> Any:
        """The next object that the process sends.

        Args:
            deadline: a value of ``time.monotonic``; by default there is none.

        Raises:
            TimeoutError: nothing has come by then.
            Died: the process has ended.
        """
        if not self.connection.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            return self.connection.recv()
        except (EOFError, OSError):  # OSError if it died in the middle of its report
            raise self._death() from None

    def _death(self) -> Died:
        self._process.join(EXIT_GRACE_S)
        code = self._process.exitcode
        if code is None:
            return Died("hung up without a report")
        if code == -signal.SIGKILL and _oom_kills() > self._kills_before:
            return Died("killed by the kernel's out-of-memory killer", out_of_memory=True)
        return Died(f"died without a report: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")

    def end(self, grace_s: float = 0.0) -> None:
        """Hang up, let it end by itself for so long, kill it and whatever it has started; returns once it is gone."""
        self.connection.close()
        self._process.join(grace_s)
        assert self._process.pid is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


@atexit.register  # runs before multiprocessing's, which would wait for them
def _kill_the_lost() -> None:
    """Kill processes that nobody has ended, as an interrupt came before who started them had them."""
    for process in multiprocessing.active_children():
        if process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def age_s() -> float:
    """Seconds since this process was started, to hundredths."""
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    # There psutil adds the ticks since boot to the time of the boot in whole seconds.
    ticks = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


def _oom_kills() -> int:
    """Processes that the kernel's out-of-memory killer has taken since boot; 0 where the kernel does not say."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _run(connection: Any, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()
    _let_server_end()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_PARENT)
    with suppress(OSError):  # if memory runs out, this process goes and its parent stays
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    body(connection, *args)


def _let_server_end() -> None:
    """Close the pipe whose end tells the fork server that who started it has gone; a stopped process would hold it."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def end_with_parent() -> None:
    """Let this process of multiprocessing, and the group that it leads, if it leads one, be killed with its parent."""
    if sys.platform == "linux":  # a process that is stopped runs no thread; forked ones have the fork server as parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent, own = multiprocessing.parent_process(), os.getpid()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    (os.killpg if os.getpgrp() == own else os.kill)(own, signal.SIGKILL)
