"""Did each all-gather of FSDP finish before its unit needed it? Measured where the unit waits.

    waits = GatherWaits(fsdp)
    ...                                   # steps
    found = waits.read()                  # milliseconds that each wait of a unit for its weights lasted
    waits.remove()

On a GPU two events stand on the computing stream, before it is told to wait for the collective and after: the time
between them is what the collective was late, and is near zero if it was in time. On a CPU it is the time that the
caller stood still. Attached from outside; the wrapped model does not know of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import GroupState, ShardedGroup
from cs336_systems.harness.clock import synchronize

LATE_MS = 0.02
"""Longer waits count as late: two events with nothing between them lie a few microseconds apart."""


@dataclass(frozen=True)
class Wait:
    """How long a group's first parameter and its neighbours were waited for."""

    name: str
    ms: float

    @property
    def late(self) -> bool:
        return self.ms > LATE_MS


class GatherWaits:
    """Times every wait for a gather that was under way, in order."""

    def __init__(self, fsdp: FSDP) -> None:
        self._device = fsdp.device
        self._groups = fsdp.groups
        self._marks: list[tuple[str, torch.cuda.Event | float, torch.cuda.Event | float]] = []
        for group in fsdp.groups:
            group.wait = self._timed(group, group.wait)  # type: ignore[method-assign]

    def _timed(self, group: ShardedGroup, wait: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            if group.state is not GroupState.GATHERING:
                return
            before = self._mark()
            wait()
            self._marks.append((group.parameters[0].names[0], before, self._mark()))

        return timed

    def _mark(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self) -> list[Wait]:
        """The waits since the last reading."""
        synchronize(self._device)
        marks, self._marks = self._marks, []
        return [Wait(name, _between(before, after)) for name, before, after in marks]

    def remove(self) -> None:
        """Leave the model as it was."""
        for group in self._groups:
            del group.wait


def _between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float) or isinstance(after, float):
        return (float(after) - float(before)) * 1e3  # type: ignore[arg-type]
    return before.elapsed_time(after)
