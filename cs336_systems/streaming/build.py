"""From a plan to the schedule of one step: kernels in their order, copies as early as slots allow, and their waits.

    schedule = build(plan)
    build_forward(plan)                     # an evaluation, in the same slots
    schedule_times(plan, schedule, rates)   # simulated: costs/lanes.py

A copy out of a slot follows the last write there. A copy into a slot stands where the slot is left and the item is on
the host. If another item must be copied out first, it stands two operations of kernels later, as it would hold up the
copies behind it on its lane. Of several copies, the one that is needed first goes first. An operation waits for
conflicts in its slots and places: for who wrote what it reads, and for who still reads what it writes over. Waits that
follow from others are left out.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from cs336_systems.costs.lanes import LANES, Lane, Lanes, LaneTimes, simulate, simulate_ranks
from cs336_systems.costs.rates import Rates
from cs336_systems.streaming.order import Task, compute_order, forward_order
from cs336_systems.streaming.plan import STATE_RINGS, Plan
from cs336_systems.streaming.schedule import Held, Item, Kind, Operation, Place, Room, Schedule, Slot, lane_of
from cs336_systems.streaming.slots import (
    EVICTION_LAG,
    GROUPED,
    Stay,
    find_stays,
    is_resident,
    is_state,
    resident_slot,
    ring_of,
)


def build(plan: Plan) -> Schedule:
    """The schedule of one step.

    Raises:
        TooFewSlotsError: a ring has too few slots.
    """
    return _Builder(plan, list(compute_order(plan))).run()


def build_forward(plan: Plan) -> Schedule:
    """The schedule of an evaluation: losses of one round's chunks, from and to the slots and places of a step.

    Raises:
        TooFewSlotsError: as ``build``.
    """
    return _Builder(plan, list(forward_order(plan))).run()


def schedule_times(plan: Plan, schedule: Schedule, rates: Rates) -> LaneTimes:
    """When the operations begin and end, simulated; in a ring as if no rank ever waited for another."""
    return simulate(*_lanes(plan, schedule, rates), rates)


def ring_times(plans: Sequence[Plan], schedules: Sequence[Schedule], rates: Rates) -> list[LaneTimes]:
    """When the operations of all ranks of a ring begin and end, simulated.

    Raises:
        ValueError: what a rank sends is not what another receives.
        RuntimeError: ranks wait for each other in a circle.
    """
    return simulate_ranks(
        [_lanes(*each, rates) for each in zip(plans, schedules, strict=True)], pairs(schedules), rates
    )


def pairs(schedules: Sequence[Schedule]) -> list[list[tuple[int, int]]]:
    """Groups of (rank, operation) that begin at one time: a send and its receive, and the reduction at a step's end.

    Raises:
        ValueError: what a rank sends is not what another receives, in the same order.
    """
    sent: dict[tuple[int, int], list[tuple[Item, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Item, int]]] = defaultdict(list)
    reductions = []
    for rank, schedule in enumerate(schedules):
        for i, operation in enumerate(schedule.operations):
            if operation.kind is Kind.SEND:
                sent[rank, operation.peer].append((operation.reads[0].item, i))
            elif operation.kind is Kind.RECEIVE:
                received[operation.peer, rank].append((operation.writes[0].item, i))
            elif operation.meets:
                reductions.append((rank, i))
    found = [reductions] if len(schedules) > 1 else []
    for source, target in sent.keys() | received.keys():
        theirs, ours = sent[source, target], received[source, target]
        if [item for item, _ in theirs] != [item for item, _ in ours]:
            raise ValueError(
                f"rank {source} sends {len(theirs)} items that rank {target} does not expect in this order"
            )
        found += [[(source, i), (target, j)] for (_, i), (_, j) in zip(theirs, ours, strict=True)]
    return found


def _lanes(plan: Plan, schedule: Schedule, rates: Rates) -> Lanes:
    operations, group = schedule.operations, plan.work.chunks_per_sequence
    seconds = cache(partial(plan.work.seconds, rates=rates))
    amounts = [
        o.n_bytes or seconds("fixed optimizer" if o.meets else str(o.kind), o.chunk % group, o.level)
        for o in operations
    ]
    return Lanes([o.lane for o in operations], amounts, [o.waits for o in operations])


class _Waits:
    """Finds what each operation must wait for, by what has ended before it and who uses its slots and places."""

    def __init__(self) -> None:
        self._known: list[tuple[int, ...]] = []
        """The last operation of each lane that has ended when an operation has, by operation, then lane."""
        self._lanes: list[int] = []
        self._last: list[int] = [-1] * len(LANES)
        self._writer: dict[Slot | Place, int] = {}
        """The operation that wrote last."""
        self._readers: dict[Slot | Place, list[int]] = defaultdict(list)
        """The operations that have read since."""

    def add(self, lane: Lane, reads: Sequence[Slot | Place], writes: Sequence[Slot | Place]) -> tuple[int, ...]:
        """Adds the next operation of a lane; returns the operations that it has to wait for."""
        needed = {self._writer.get(where, -1) for where in (*reads, *writes)}
        needed.update(*(self._readers[where] for where in writes))
        needed.discard(-1)
        own, index = LANES.index(lane), len(self._known)
        known = list(self._known[self._last[own]]) if self._last[own] >= 0 else [-1] * len(LANES)
        waits = []
        for j in sorted(needed, reverse=True):  # the latest first: it may imply the others
            if known[self._lanes[j]] < j:
                waits.append(j)
                known = list(map(max, known, self._known[j]))
        known[own] = self._last[own] = index
        self._known.append(tuple(known))
        self._lanes.append(own)
        for where in writes:
            self._writer[where], self._readers[where] = index, []
        for where in reads:
            if where not in writes:
                self._readers[where].append(index)
        return tuple(sorted(waits))


@dataclass(frozen=True)
class _Copy:
    need: int
    """The operation of the compute lane that uses what comes in, or that wrote what goes out."""
    item: Item
    slot: Slot


class _Builder:
    """Builds the schedule of some tasks."""

    def __init__(self, plan: Plan, tasks: list[Task]) -> None:
        self.plan, self.tasks = plan, tasks
        self.stays, self.sizes = find_stays(plan, tasks)
        self.operations: list[Operation] = []
        self.waits = _Waits()
        self.place_counts: dict[str, int] = defaultdict(int)
        self.free_places: dict[str, deque[Place]] = defaultdict(deque)
        """Places of each region in the order in which they were left."""
        self.places: dict[Item, Place] = {}
        self.fetches_left: dict[Item, int] = defaultdict(int)

    def run(self) -> Schedule:
        plan, group = self.plan, self.plan.work.chunks_per_sequence
        names, item_bytes = plan.work.streamed_moments, plan.work.item_bytes
        residents = {what: len(plan.resident_layers(what)) for what in (*STATE_RINGS, "moments")}
        layers = plan.work.layers
        state = [Item(what, k) for k in layers for what in ("weights", *names)]
        self.held_at = {
            item: Slot(ring_of(plan, item), resident_slot(plan, item))
            for item in (*state, *(Item("gradients", k) for k in layers))
            if is_resident(plan, item)
        }
        homes = {item: self._home(item) for item in state if item not in self.held_at}
        self.places |= homes
        self._emit(*self._copies(residents))

        rings = {ring: n * (group if ring in GROUPED else 1) for ring, n in self.sizes.items()}
        rings |= {what: self.sizes.get(what, 0) + residents[what] for what in STATE_RINGS}
        rings["moments"] = residents["moments"] * len(names)
        beside = {
            "moments": max(map(item_bytes, names), default=0),
            "products": plan.slot_bytes["products"],
        }  # moments that stream lie there, too
        return Schedule(
            tuple(self.operations),
            {ring: Room(n, beside.get(ring) or item_bytes(ring)) for ring, n in rings.items() if n},
            {name: Room(n, item_bytes(name)) for name, n in self.place_counts.items()},
            {item: slot for item, slot in self.held_at.items() if is_state(plan, item)},
            homes,
        )

    def _copies(self, residents: dict[str, int]) -> tuple[dict[int, list[_Copy]], dict[int, list[_Copy]]]:
        """Copies in by the task after which they can run, -1 for the start; copies out by the task that they follow."""
        fetches: dict[int, list[_Copy]] = defaultdict(list)
        evictions: dict[int, list[_Copy]] = defaultdict(list)
        slot_left: dict[Slot, int] = {}
        item_left: dict[Item, int] = {}
        holds: dict[Slot, Item] = {}
        lies_in: dict[Item, Slot] = {}
        changes: dict[Item, _Copy] = {}
        """Copies out of items that have been written since they were last on the host."""
        for stay in self.stays:
            stay.slot += residents.get(stay.unit.ring, 0)
            first: dict[Item, tuple[int, bool]] = {}
            last: dict[Item, int] = {}
            written: dict[Item, int] = {}
            for t, use in stay.uses:
                first.setdefault(use.item, (t, not use.reads))
                last[use.item] = t
                if use.writes:
                    written[use.item] = t
            for item, (need, creates) in first.items():
                slot = self._slot(stay, item)
                if not creates and (holds.get(slot), lies_in.get(item)) != (item, slot):
                    if changed := changes.pop(item, None):
                        evictions[changed.need].append(changed)
                    self.fetches_left[item] += 1
                    begin = min(need - 1, max(slot_left.get(slot, -1), item_left.get(item, -1)))
                    fetches[begin].append(_Copy(need, item, slot))
                slot_left[slot] = item_left[item] = last[item] + (EVICTION_LAG if stay.leaves else 0)
                holds[slot], lies_in[item] = item, slot
            for item, t in written.items():
                changes[item] = _Copy(t, item, self._slot(stay, item))
                if stay.home:
                    evictions[t].append(changes[item])
        return fetches, evictions

    def _slot(self, stay: Stay, item: Item) -> Slot:
        if stay.unit.ring not in GROUPED:
            return Slot(stay.unit.ring, stay.slot)
        group = self.plan.work.chunks_per_sequence
        return Slot(stay.unit.ring, stay.slot * group + item.chunk % group)

    def _emit(self, fetches: dict[int, list[_Copy]], evictions: dict[int, list[_Copy]]) -> None:
        where: list[dict[Item, Slot]] = [{} for _ in self.tasks]
        for stay in self.stays:
            for t, use in stay.uses:
                where[t][use.item] = self._slot(stay, use.item)
        for t in range(-1, len(self.tasks)):
            if t >= 0:
                self._run(self.tasks[t], where[t])
                for copy in evictions.get(t, ()):
                    self._copy(copy, Kind.EVICT)
            for copy in sorted(fetches.get(t, ()), key=lambda copy: copy.need):
                self._copy(copy, Kind.FETCH)

    def _run(self, task: Task, slots: Mapping[Item, Slot]) -> None:
        """Places kernels, or a message."""
        held = [(use, Held(use.item, slots.get(use.item) or self.held_at[use.item])) for use in task.uses]
        reads = tuple(of_item for use, of_item in held if use.reads)
        writes = tuple(of_item for use, of_item in held if use.writes)
        waits = self.waits.add(lane_of(task.kind), [x.slot for x in reads], [x.slot for x in writes])
        n_bytes = self.plan.work.item_bytes("dy") if task.peer >= 0 else 0  # as many as x has
        operation = Operation(
            *(task.kind, task.layer, task.round, task.chunk, reads, writes, waits),
            n_bytes=n_bytes,
            level=task.level,
            accumulate=task.accumulate,
            peer=task.peer,
        )
        self.operations.append(operation)

    def _copy(self, copy: _Copy, kind: Kind) -> None:
        """Places a copy, a fetch or an evict."""
        item, out = copy.item, kind is Kind.EVICT
        place = self.places.get(item) or self._take_place(item)
        held, n_bytes = (Held(item, copy.slot),), self.plan.work.item_bytes(item.what)
        waits = self.waits.add(Lane.OUT, [copy.slot], [place]) if out else self.waits.add(Lane.IN, [place], [copy.slot])
        reads, writes = (held, ()) if out else ((), held)
        at = item.layer, item.round, item.chunk
        self.operations.append(Operation(kind, *at, reads, writes, waits, place, n_bytes))
        if out:
            return
        self.fetches_left[item] -= 1
        if not self.fetches_left[item] and not is_state(self.plan, item):
            self.free_places[place.region].append(self.places.pop(item))

    def _home(self, item: Item) -> Place:
        """A new place for an item."""
        self.place_counts[item.what] += 1
        return Place(item.what, self.place_counts[item.what] - 1)

    def _take_place(self, item: Item) -> Place:
        """The place that was left the longest ago, or a new one."""
        free = self.free_places[item.what]
        self.places[item] = free.popleft() if free else self._home(item)
        return self.places[item]
