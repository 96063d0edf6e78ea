"""Which item lies in which slot from when to when: stays in rings of slots, for the kernels of a step in their order.

An item that a ring has no room for leaves it between two uses and comes back for the second. Which one: the order is
known, so that of those in the ring whose next use is the farthest (Belady 1966), among items of one size the fewest
copies; one slot is left free for what comes next. A stay takes the slot that has been free the longest, so that copies
have the longest time: into it since it was left, out of it until it is taken.

Time is counted in operations of the compute lane.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from cs336_systems.streaming.order import Step, Use
from cs336_systems.streaming.plan import STATE_RINGS, Plan
from cs336_systems.streaming.schedule import Item, Kind

SPARE = 1
"""Slots of a ring that hold nothing from one use to another, unless all fits."""
EVICTION_LAG = 2
"""Operations of kernels that a copy out of a slot is taken to last: with fewer, steps are up to 9 % slower."""

GROUPED = ("context", "dcontext")
"""Items of a sequence's chunks, whose slots lie one after the other."""


class Unit(NamedTuple):
    """What takes a slot: an item, or those of one sequence, which take as many slots as there are of them."""

    ring: str
    item: Item
    """The first one."""


@dataclass
class Stay:
    """Of a unit in one slot (or group of slots), from its first use there to its last."""

    unit: Unit
    uses: list[tuple[int, Use]] = field(default_factory=list)
    """With the time of each."""
    returns: bool = False
    """A later stay reads what is there at the end of this one."""
    home: bool = False
    """What was written must reach the host before the step ends: state whose home that is."""
    slot: int = -1

    @property
    def first(self) -> int:
        return self.uses[0][0]

    @property
    def last(self) -> int:
        return self.uses[-1][0]

    @property
    def leaves(self) -> bool:
        """Whether anything is copied out."""
        return (self.returns or self.home) and any(use.writes for _, use in self.uses)


class TooFewSlotsError(ValueError):
    """A ring cannot hold what one operation needs."""


def ring_of(plan: Plan, item: Item) -> str:
    """The ring in which an item lies: moments of layers that stream share the slots of ``products``."""
    if item.what in dict(plan.work.moments):
        return "moments" if is_resident(plan, item) else "products"
    return item.what


def unit_of(plan: Plan, item: Item) -> Unit:
    if item.what in GROUPED:
        first = item.chunk - item.chunk % plan.work.chunks_per_sequence
        return Unit(item.what, Item(item.what, item.layer, item.round, first))
    return Unit(ring_of(plan, item), item)


def is_resident(plan: Plan, item: Item) -> bool:
    """Whether it has a slot of its own from step to step."""
    what = "moments" if item.what in dict(plan.work.moments) else item.what
    return item.layer in plan.resident_layers(what)


def is_state(plan: Plan, item: Item) -> bool:
    """Whether the next step begins with it."""
    return item.what == "weights" or item.what in dict(plan.work.moments)


def resident_slot(plan: Plan, item: Item) -> int:
    """The index in its ring; residents have the first ones."""
    if item.what in STATE_RINGS:
        return plan.resident_layers(item.what).index(item.layer)
    names = [name for name, _ in plan.work.moments]
    return plan.resident_layers("moments").index(item.layer) * len(names) + names.index(item.what)


def find_stays(plan: Plan, steps: Sequence[Step]) -> tuple[list[Stay], dict[str, int]]:
    """All stays in slots that are shared, in the order in which they begin; and each ring's slots, in units.

    Raises:
        TooFewSlotsError: a ring has too few slots.
    """
    uses: dict[str, dict[Unit, list[tuple[int, Use]]]] = defaultdict(lambda: defaultdict(list))
    shared = cache(lambda item: None if is_resident(plan, item) else unit_of(plan, item))
    for t, step in enumerate(steps):
        for use in step.uses:
            if (unit := shared(use.item)) is not None:
                uses[unit.ring][unit].append((t, use))
    given = dict(plan.slots)
    stays, sizes = [], {}
    for ring, of_ring in uses.items():
        found = _Sweep(plan, steps, ring, of_ring).run(given.get(ring))
        assigned, sizes[ring] = _assign(ring, found, given.get(ring))
        stays += assigned
    return sorted(stays, key=lambda stay: stay.first), sizes


class _Sweep:
    """Through the uses of one ring in the order of time."""

    def __init__(self, plan: Plan, steps: Sequence[Step], ring: str, uses: dict[Unit, list[tuple[int, Use]]]) -> None:
        self.plan, self.ring, self.uses = plan, ring, uses
        self.waits_for_forward = ring == "input"
        self.kinds = [step.kind for step in steps]
        self.at: dict[int, list[Unit]] = defaultdict(list)
        for unit, of_unit in uses.items():
            for t in sorted({t for t, _ in of_unit}):
                self.at[t].append(unit)

    def run(self, slots: int | None) -> list[Stay]:
        """With so many slots; None for as many as it takes to copy nothing."""
        everything = slots is None or self._most_alive() <= slots
        room = None if everything or slots is None else max(1, slots - (SPARE if self.ring not in GROUPED else 0))
        live: dict[Unit, Stay] = {}
        stays: list[Stay] = []
        position = dict.fromkeys(self.uses, 0)
        for t in sorted(self.at):
            now = self.at[t]
            for unit in now:
                if unit not in live:
                    live[unit] = Stay(unit)
                    stays.append(live[unit])
                of_unit, i = self.uses[unit], position[unit]
                while i < len(of_unit) and of_unit[i][0] == t:
                    live[unit].uses.append(of_unit[i])
                    i += 1
                position[unit] = i
            if slots is not None and len(live) > slots:
                self._make_room(live, now, position, slots)
            for unit in now:
                if not self._needed_again(unit, position[unit]):
                    del live[unit]
            if room is not None and len(live) > room:
                self._make_room(live, [], position, room, all_if_forced=True)
        for stay in {stay.unit: stay for stay in stays}.values():  # the last of each unit
            stay.home = is_state(self.plan, stay.unit.item)
        return stays

    def _make_room(
        self,
        live: dict[Unit, Stay],
        now: list[Unit],
        position: dict[Unit, int],
        room: int,
        *,
        all_if_forced: bool = False,
    ) -> None:
        while len(live) > room:
            free = [unit for unit in live if unit not in now and not self._stays(unit, position[unit])]
            if not free:
                if all_if_forced:
                    return
                raise TooFewSlotsError(f"{self.ring} needs {len(live)} slots, got {room}")
            victim = max(free, key=lambda unit: self.uses[unit][position[unit]][0])
            live.pop(victim).returns = True

    def _needed_again(self, unit: Unit, i: int) -> bool:
        """Whether what lies there is read later."""
        return i < len(self.uses[unit]) and not self._is_new(unit, i)

    def _is_new(self, unit: Unit, i: int) -> bool:
        """Whether a use makes anew what lies there: a sequence with its first chunk."""
        use = self.uses[unit][i][1]
        return use.creates and use.item == unit.item

    def _stays(self, unit: Unit, i: int) -> bool:
        """Whether it may not leave: x on its way to the next layer, and what never moves."""
        if self.ring in ("dy", "dcontext"):
            return True
        return self.waits_for_forward and self.kinds[self.uses[unit][i][0]] in (Kind.FORWARD, Kind.HEAD, Kind.LOSS)

    def _most_alive(self) -> int:
        """Units that are needed at one time, if none leaves."""
        changes: dict[int, int] = defaultdict(int)
        for unit, of_unit in self.uses.items():
            begin = None
            for i, (t, _) in enumerate(of_unit):
                if begin is None or (self._is_new(unit, i) and of_unit[i - 1][0] < t):
                    if begin is not None:
                        changes[of_unit[i - 1][0] + 1] -= 1
                    changes[t] += 1
                    begin = t
            changes[of_unit[-1][0] + 1] -= 1
        alive = most = 0
        for t in sorted(changes):
            alive += changes[t]
            most = max(most, alive)
        return most


@dataclass(frozen=True, order=True)
class _Slot:
    """A slot that a stay may take."""

    ready: int
    """When it can be had, the time of a copy out of it taken into account."""
    left: int
    """When it is used last."""
    index: int
    stay: Stay | None = field(default=None, compare=False)
    """The last one there."""


def _assign(ring: str, stays: list[Stay], slots: int | None) -> tuple[list[Stay], int]:
    """Gives each stay the slot that has been free the longest, or the one where its unit still lies, which makes one
    stay of two; returns these, and how many slots there are.
    """
    found: list[Stay] = []
    free: list[_Slot] = []
    for stay in sorted(stays, key=lambda stay: stay.first):
        still = [slot for slot in free if slot.stay and slot.stay.returns and slot.stay.unit == stay.unit]
        if still:
            chosen = still[0]
            assert chosen.stay is not None
            chosen.stay.uses += stay.uses
            chosen.stay.returns, chosen.stay.home = stay.returns, stay.home
            stay = chosen.stay
        else:
            usable = [slot for slot in free if slot.left < stay.first]
            if len(free) < slots if slots is not None else not usable:
                usable = [_Slot(-1, -1, len(free))]
                free += usable
            if not usable:
                raise TooFewSlotsError(f"{ring} needs more than {slots} slots")
            chosen = min(usable)
            stay.slot = chosen.index
            found.append(stay)
        free.remove(chosen)
        free.append(_Slot(stay.last + (EVICTION_LAG if stay.leaves else 0), stay.last, chosen.index, stay))
    return found, len(free) if slots is None else slots
