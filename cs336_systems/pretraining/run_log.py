"""Where a training run's records go: a file of JSON lines, and whatever else listens.

    with RunLog(LogFile.open(folder / LOG, resume=False), RunConsole()) as log:
        log.write(Options(options, defaults, n_steps=1000))
        log.write(Step(0, seconds, tokens, loss, norm, learning_rate))

A run that resumes at a step appends to its log, and hands over what led up to it:

    earlier = [step for step in read_run(folder / LOG).all(Step) if step.step < first_step]
    with RunLog(LogFile.open(folder / LOG, resume=True), RunConsole(), earlier=earlier) as log: ...

The first rank alone has a log, and one process at a time writes it: the file is locked, where its file system has
locks. Every line is written in one piece the moment it is said, so at every moment the file is
whole lines and at most one that is torn, at its end: after a kill, or on a full disk. A resumed run cuts that off.

Records hold numbers of the host. To read a loss from the device is to wait for the step that makes it, so whoever
trains reads it a step later, from a copy that the device has made meanwhile: ``deferred.py``. No sink sees a tensor.

A step that is far from those before it is flagged with a record of its own. A sink that cannot write (its disk is full)
is reported to the others, and training goes on; what it did not take is lost to it alone. Where it cannot take the
options, with which a session begins, there is none: what came after would be read as an earlier session's.
"""

import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from cs336_systems.pretraining.outliers import WINDOW, OutlierWatch
from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import Level, Message, Options, Record, Step, to_line

LOG = "log.jsonl"
"""A run's log in its folder."""


class Sink(Protocol):
    """Takes every record; OSError if it cannot take this one."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class LogFile:
    """The file of JSON lines."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path

    @classmethod
    def open(cls, path: Path, *, resume: bool) -> Self:
        """A new log, or the end of one that is there; resuming where there is none begins one.

        Raises:
            ValueError: what is to be resumed is no log, of another version, or written by another process now.
            FileExistsError: what is to be new is there.
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_APPEND if resume and path.exists() else os.O_APPEND | os.O_CREAT | os.O_EXCL
        log = cls(os.open(path, os.O_WRONLY | flags, 0o644), path)
        try:
            log._lock()
            os.ftruncate(log._descriptor, read_run(path).n_bytes)
        except BaseException:
            log.close()
            raise
        return log

    def write(self, record: Record) -> None:
        """Append the record's line, or nothing of it.

        Raises:
            TypeError: it holds what JSON does not, such as a tensor.
            OSError: it cannot be written.
        """
        line, start = to_line(record), os.fstat(self._descriptor).st_size
        assert start or isinstance(record, Options), f"a log begins with options, not with {record}"
        try:
            while line:  # a disk takes some of a line before it says that it is full
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            os.ftruncate(self._descriptor, start)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self._path} is being written by another process") from None
        except OSError:  # of a file system that has no locks
            pass


class RunLog:
    """Hands each record to every sink, from any thread; adds what is out of line.

    Args:
        earlier: steps before those of a run that is resumed, with which its next ones are compared.
    """

    def __init__(self, *sinks: Sink, earlier: Sequence[Step] = ()) -> None:
        self._sinks = sinks
        self._failing: list[Sink] = []
        self._watch = OutlierWatch()
        self._lock = threading.RLock()  # a signal handler may write while its own thread does
        for step in earlier[-WINDOW:]:
            self._watch.see(step)

    def write(self, record: Record) -> None:
        """Say it now.

        Raises:
            OSError: a sink cannot take the options.
        """
        with self._lock:
            self._hand(record, self._sinks)
            for outlier in self._watch.see(record) if isinstance(record, Step) else ():
                self.write(outlier)

    def say(self, text: str, level: Level = "info") -> None:
        """Write a message."""
        self.write(Message(text, level))

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hand(self, record: Record, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            try:
                sink.write(record)
            except OSError as error:
                if isinstance(record, Options):
                    raise
                if sink not in self._failing:
                    self._failing.append(sink)
                    fault = f"{type(sink).__name__} cannot be written and will lack lines: {error.strerror or error}"
                    self._hand(Message(fault, "error"), [other for other in self._sinks if other is not sink])
            else:
                if sink in self._failing:
                    self._failing.remove(sink)
