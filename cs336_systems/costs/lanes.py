"""When operations on three lanes begin and end: kernels, and copies in both directions over one link.

Each lane runs its operations in order, one at a time; an operation begins when the one before it on its lane and all
that it waits for have ended. Speeds depend on what else runs at that moment: two copies share the link, and kernels run
a little slower beside copies. ``streaming/schedule.py`` says what the operations are.

    timeline = simulate(lanes, amounts, waits, rates)
    timeline.span, timeline.busy["compute"], timeline.starts[i]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cs336_systems.costs.streaming import Rates

LANES = ("in", "compute", "out")


@dataclass(frozen=True)
class LaneTimes:
    """When the operations of a schedule begin and end, simulated or measured, in seconds."""

    lanes: Sequence[str]
    starts: Sequence[float]
    ends: Sequence[float]
    waited_for: Mapping[str, float]
    """Seconds in which the compute lane stood still, by the lane that it waited for."""

    @property
    def span(self) -> float:
        return max(self.ends, default=0.0)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds in which each lane works."""
        found = dict.fromkeys(LANES, 0.0)
        for lane, start, end in zip(self.lanes, self.starts, self.ends, strict=True):
            found[lane] += end - start
        return found


def simulate(lanes: Sequence[str], amounts: Sequence[float], waits: Sequence[Sequence[int]], rates: Rates) -> LaneTimes:
    """Run operations as early as lanes and waits allow.

    Args:
        lanes: lane of each operation.
        amounts: bytes of each copy; of all others the seconds that they take alone on the device.
        waits: indices of the operations that each waits for; they stand earlier.

    Raises:
        ValueError: an operation waits for itself or a later one.
    """
    for i, needed in enumerate(waits):
        if any(j >= i for j in needed):
            raise ValueError(f"operation {i} waits for {max(needed)}, which does not stand before it")
    queues = {lane: [i for i, own in enumerate(lanes) if own == lane] for lane in LANES}
    heads = dict.fromkeys(LANES, 0)
    free = dict.fromkeys(LANES, 0.0)
    starts, ends = [0.0] * len(lanes), [-1.0] * len(lanes)
    left: dict[str, float] = {}  # what is left of the operation that each lane runs
    stalled = dict.fromkeys(LANES, 0.0)
    now = 0.0
    while True:
        for lane in LANES:
            if lane in left or heads[lane] == len(queues[lane]):
                continue
            i = queues[lane][heads[lane]]
            if all(ends[j] >= 0 for j in waits[i]):
                if lane == "compute":
                    last = max(waits[i], key=lambda j: ends[j], default=None)
                    if last is not None and ends[last] > free[lane]:
                        stalled[lanes[last]] += now - free[lane]
                starts[i], left[lane] = now, amounts[i]
                if lane != "compute":
                    left[lane] += rates.copy_latency_s * rates.link_alone
        if not left:
            break
        copies = ("in" in left) + ("out" in left)
        into, out = (rates.link_in_both, rates.link_out_both) if copies == 2 else (rates.link_alone, rates.link_alone)
        speeds = {"in": into, "compute": 1 - copies * (1 - rates.beside_copies), "out": out}
        step = min(left[lane] / speeds[lane] for lane in left)
        now += step
        for lane in list(left):
            left[lane] -= step * speeds[lane]
            if left[lane] <= 1e-9 * max(1.0, speeds[lane]):
                del left[lane]
                ends[queues[lane][heads[lane]]], free[lane] = now, now
                heads[lane] += 1
    return LaneTimes(lanes, starts, ends, stalled)
