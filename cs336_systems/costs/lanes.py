"""Simulates when the operations of a streamed step begin and end, on one rank or on all ranks of a ring.

Operations run on lanes: one for kernels, one for host copies in each direction and, in a ring, one each for messages to
and from other ranks. A lane runs its operations in order, each as soon as its dependencies have ended. Copies share the
host link and, with the copies of other ranks, the host's memory bandwidth; they slow kernels slightly. Messages use
another link and do not slow kernels.

    times = simulate(["in", "compute"], amounts=[2**30, 0.1], waits=[(), (0,)], rates=rates)
    times.span, times.busy["compute"]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cs336_systems.costs.rates import Rates


class Lane(StrEnum):
    """Copies to the device, kernels, copies to the host; in a ring also messages to and from other ranks."""

    IN = "in"
    COMPUTE = "compute"
    OUT = "out"
    SEND = "send"
    RECEIVE = "receive"


LANES: tuple[str, ...] = tuple(Lane)


@dataclass(frozen=True)
class LaneTimes:
    """When the operations of a schedule begin and end, simulated or measured, in seconds."""

    lanes: Sequence[str]
    starts: Sequence[float]
    ends: Sequence[float]
    waited_for: Mapping[str, float]
    """Seconds for which the compute lane was idle, by the lane that it waited for; ``compute`` means other ranks."""

    @property
    def span(self) -> float:
        return max(self.ends, default=0.0)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds in which each lane works."""
        found = dict.fromkeys((*LANES[:3], *self.lanes), 0.0)
        for lane, start, end in zip(self.lanes, self.starts, self.ends, strict=True):
            found[lane] += end - start
        return found


class Lanes(NamedTuple):
    """The operations of one rank, in the order in which it enqueues them."""

    lanes: Sequence[str]
    amounts: Sequence[float]
    """Bytes of each copy or message; for every other operation, seconds when no copies run beside it."""
    waits: Sequence[Sequence[int]]
    """Indices of the earlier operations that each waits for."""


def simulate(lanes: Sequence[str], amounts: Sequence[float], waits: Sequence[Sequence[int]], rates: Rates) -> LaneTimes:
    """``simulate_ranks`` for one rank, which never waits for other ranks."""
    (times,) = simulate_ranks([Lanes(lanes, amounts, waits)], [], rates)
    return times


def simulate_ranks(
    ranks: Sequence[Lanes], together: Sequence[Sequence[tuple[int, int]]], rates: Rates
) -> list[LaneTimes]:
    """Simulate all ranks, with every operation as early as its lane and its dependencies allow.

    Args:
        together: groups of (rank, operation) that begin at the same time, as a send and its receive do.

    Raises:
        ValueError: an operation waits for itself or a later one.
        RuntimeError: ranks deadlock.
    """
    for of_rank in ranks:
        for i, needed in enumerate(of_rank.waits):
            if any(j >= i for j in needed):
                raise ValueError(f"operation {i} waits for {max(needed)}, which does not stand before it")
    machines = [_Machine(each, rates) for each in ranks]
    partners = {member: [each for each in group if each != member] for group in together for member in group}
    now = 0.0
    while True:
        began = True
        while began:
            began = False
            for rank, machine in enumerate(machines):
                for lane, i in machine.ready():
                    others = partners.get((rank, i), ())
                    if all(machines[other].is_ready(j) for other, j in others):
                        machine.begin(lane, i, now)
                        for other, j in others:
                            machines[other].begin(machines[other].of.lanes[j], j, now)
                        began = True
        copying = sum(machine.copies > 0 for machine in machines)
        steps = [step for machine in machines if (step := machine.next_end(copying)) is not None]
        if not steps:
            break
        now += min(steps)
        for machine in machines:
            machine.advance(min(steps), now)
    for rank, machine in enumerate(machines):
        if stuck := machine.stuck():
            raise RuntimeError(f"ranks wait for each other in a circle: operations {stuck} of rank {rank} never begin")
    return [LaneTimes(machine.of.lanes, machine.starts, machine.ends, machine.stalled) for machine in machines]


class _Machine:
    """The state of one rank in the simulation."""

    def __init__(self, of: Lanes, rates: Rates) -> None:
        self.of, self.rates = of, rates
        self.queues = {lane: [i for i, own in enumerate(of.lanes) if own == lane] for lane in LANES}
        self.queues = {lane: queue for lane, queue in self.queues.items() if queue}
        self.heads = dict.fromkeys(self.queues, 0)
        self.free = dict.fromkeys(self.queues, 0.0)
        self.starts, self.ends = [0.0] * len(of.lanes), [-1.0] * len(of.lanes)
        self.left: dict[str, float] = {}
        """Remaining bytes or seconds of each lane's running operation."""
        self.stalled = dict.fromkeys((*LANES[:3], *self.queues), 0.0)
        self.speeds: dict[str, float] = {}

    def ready(self) -> list[tuple[str, int]]:
        """(lane, operation) of each free lane whose next operation waits for nothing else on this rank."""
        found, ends = [], self.ends
        for lane, queue in self.queues.items():
            if lane not in self.left and self.heads[lane] < len(queue):
                i = queue[self.heads[lane]]
                if all(ends[j] >= 0 for j in self.of.waits[i]):
                    found.append((lane, i))
        return found

    def is_ready(self, i: int) -> bool:
        return (self.of.lanes[i], i) in self.ready()

    def begin(self, lane: str, i: int, now: float) -> None:
        if lane in self.left:
            return  # it began with its partner
        self.starts[i], self.left[lane] = now, self.of.amounts[i]
        if lane == "compute":
            last = max(self.of.waits[i], key=lambda j: self.ends[j], default=None)
            ready = self.free[lane]
            if last is not None and self.ends[last] > ready:
                self.stalled[self.of.lanes[last]] += self.ends[last] - ready
                ready = self.ends[last]
            self.stalled[lane] += now - ready  # waited for its partners on other ranks
        elif lane in ("in", "out"):
            self.left[lane] += self.rates.copy_latency_s * self.rates.link_alone

    @property
    def copies(self) -> int:
        """The number of directions in which this rank's host link is busy."""
        return ("in" in self.left) + ("out" in self.left)

    def next_end(self, copying: int) -> float | None:
        """Seconds until the next operation ends, None if none runs; ``copying`` is the number of ranks that copy."""
        if not self.left:
            return None
        rates, copies = self.rates, self.copies
        into, out = rates.link(both=copies == 2, copying=copying - (copies > 0))
        self.speeds = {"in": into, "compute": 1 - copies * (1 - rates.beside_copies), "out": out}
        self.speeds |= dict.fromkeys(("send", "receive"), rates.messages)
        return min(left / self.speeds[lane] for lane, left in self.left.items())

    def advance(self, seconds: float, now: float) -> None:
        for lane in list(self.left):
            self.left[lane] -= seconds * self.speeds[lane]
            if self.left[lane] <= 1e-9 * max(1.0, self.speeds[lane]):
                del self.left[lane]
                self.ends[self.queues[lane][self.heads[lane]]] = self.free[lane] = now
                self.heads[lane] += 1

    def stuck(self) -> list[int]:
        return [queue[self.heads[lane]] for lane, queue in self.queues.items() if self.heads[lane] < len(queue)]
