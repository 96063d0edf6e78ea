"""Did each all-gather of FSDP finish before its unit needed it? Measured where the unit waits.

    waits = GatherWaits(fsdp)
    ...                                   # steps
    found = waits.read()                  # milliseconds that each wait of a unit for its weights lasted
    waits.remove()

On a GPU two events stand on the computing stream, before it is told to wait for the collective and after: the time
between them is what the collective was late, and is near zero if it was in time. On a CPU it is the time that the
caller stood still. Attached from outside; the wrapped model does not know of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import GroupState, ShardedGroup
from cs336_systems.harness.clock import Stopwatch

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
        self._fsdp = fsdp
        self._names: list[str] = []
        self._stopwatch = Stopwatch(fsdp.device)
        for group in fsdp.groups:
            group.wait = self._timed(group, group.wait)  # type: ignore[method-assign]

    def _timed(self, group: ShardedGroup, wait: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            if group.state is GroupState.GATHERING:
                self._names.append(group.parameters[0].names[0])
                self._stopwatch.mark()
                wait()
                self._stopwatch.mark()

        return timed

    def read(self) -> list[Wait]:
        """The waits since the last reading."""
        waits = list(map(Wait, self._names, self._stopwatch.laps_ms()[::2]))
        self._names, self._stopwatch = [], Stopwatch(self._fsdp.device)
        return waits

    def remove(self) -> None:
        """Leave the model as it was."""
        for group in self._fsdp.groups:
            del group.wait
