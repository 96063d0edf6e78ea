"""Reasons to end a run early, and who asks for it: a time limit, SIGTERM or Ctrl-C."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

REASONS = ("walltime", "terminated", "interrupted")
"""Reasons to end a run early: its time limit, SIGTERM, Ctrl-C."""
_SIGNALS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}


class StopRequests:
    """Listens for signals while it is entered, in the main thread; elsewhere none arrives, and only time counts.

    A second signal of the same kind does what it always did.

    Args:
        ends_at: a value of ``time.monotonic``; None for no end.
    """

    def __init__(self, ends_at: float | None = None) -> None:
        self._ends_at = ends_at
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
            self._earlier = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signalled = _SIGNALS[signal.Signals(number)]
        signal.signal(number, self._earlier.pop(number))
