"""Requests that end a run early: a time limit, a signal or Ctrl-C. Imports no torch."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

REASONS = ("walltime", "terminated", "interrupted")
"""Reasons to end a run early: its time limit, SIGTERM or a terminal that is closed, Ctrl-C."""
_SIGNALS = {signal.SIGTERM: "terminated", signal.SIGHUP: "terminated", signal.SIGINT: "interrupted"}


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        folder: the folder of the run.
        first_step: the step at which this command began.
        steps: steps that are made, including those of earlier commands.
        reason: done, no gain, walltime, terminated or interrupted; failed if every replica has failed.
        complaint: why the last checkpoint could not be written, or a replica has failed; None if all went well.
        best_step: the step of the checkpoint with the lowest held-out loss, if --keep-best was given.
    """

    folder: Path
    first_step: int
    steps: int
    reason: str
    complaint: str | None
    best_step: int | None = None


class StopRequests:
    """Handles signals inside the context, in the main thread; in other threads only the time limit applies.

    A second signal of the same kind has its original effect.

    Args:
        ends_at: the time limit, a value of ``time.monotonic``; None for none.
        heard: called on the first signal.
    """

    def __init__(self, ends_at: float | None = None, heard: Callable[[], None] = lambda: None) -> None:
        self._ends_at, self._heard = ends_at, heard
        self._signalled: str | None = None
        self._earlier: dict[int, Any] = {}

    @property
    def asked(self) -> str | None:
        """One of ``REASONS`` if the run should end."""
        if self._signalled is None and self._ends_at is not None and time.monotonic() >= self._ends_at:
            return "walltime"
        return self._signalled

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            deaf = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # under nohup
            self._earlier = {number: signal.signal(number, self._hear) for number in _SIGNALS.keys() - deaf}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        first = self._signalled is None
        self._signalled = _SIGNALS[signal.Signals(number)]
        signal.signal(number, self._earlier.pop(number))
        if first:
            self._heard()
