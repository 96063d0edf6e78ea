"""The assignment of items to slots while the kernels of a step run in their order (``order.py``).

If a ring is full, an item leaves it between two uses and is copied back for the second. As the order is known, the item
with the farthest next use is evicted (Belady 1966), which takes the fewest copies among items of one size. One slot is
kept free for the next item. A stay takes the slot that has been free the longest, so that copies into and out of it
have the most time.

Time is counted in kernels' operations and messages.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from cs336_systems.streaming.order import Task, Use
from cs336_systems.streaming.plan import STATE_RINGS, Plan
from cs336_systems.streaming.schedule import Item, Kind

SPARE = 1
"""Slots of a ring that hold nothing between uses, unless all items fit: the next item is copied into them."""
EVICTION_LAG = 2
"""Operations of kernels that a copy out of a slot is assumed to last: with fewer, steps are up to 9 % slower."""

GROUPED = ("context", "dcontext")
"""Rings in which the items of a sequence's chunks have consecutive slots."""


_TAKE_X = (Kind.FORWARD, Kind.HEAD, Kind.LOSS, Kind.SEND)
"""Kinds of operations that read the x of the layer before."""


class Unit(NamedTuple):
    """The unit of assignment: an item, or in a grouped ring the items of one sequence, which take a slot each."""

    ring: str
    item: Item


@dataclass
class Stay:
    """A unit in one slot (or group of slots), from its first use there to its last."""

    unit: Unit
    uses: list[tuple[int, Use]] = field(default_factory=list)
    """Its uses, each with its time."""
    returns: bool = False
    """Whether a later stay reads the contents at the end of this one."""
    home: bool = False
    """Whether written contents must reach the host before the step ends, as state that is kept there must."""
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
    if item.what in plan.work.streamed_moments:
        return "moments" if is_resident(plan, item) else "products"
    return item.what


def unit_of(plan: Plan, item: Item) -> Unit:
    if item.what in GROUPED:
        first = item.chunk - item.chunk % plan.work.chunks_per_sequence
        return Unit(item.what, Item(item.what, item.layer, item.round, first))
    return Unit(ring_of(plan, item), item)


def is_resident(plan: Plan, item: Item) -> bool:
    """Whether it has a slot of its own from step to step."""
    what = "moments" if item.what in plan.work.streamed_moments else item.what
    return item.layer in plan.resident_layers(what)


def is_state(plan: Plan, item: Item) -> bool:
    """Whether the next step begins with it."""
    return item.what == "weights" or item.what in plan.work.streamed_moments


def resident_slot(plan: Plan, item: Item) -> int:
    """The index in its ring; residents have the first ones."""
    if item.what in STATE_RINGS:
        return plan.resident_layers(item.what).index(item.layer)
    names = plan.work.streamed_moments
    return plan.resident_layers("moments").index(item.layer) * len(names) + names.index(item.what)


def find_stays(plan: Plan, tasks: Sequence[Task]) -> tuple[list[Stay], dict[str, int]]:
    """All stays in shared slots, in the order in which they begin, and the number of slots of each ring, in units.

    Raises:
        TooFewSlotsError: a ring has too few slots.
    """
    uses: dict[str, dict[Unit, list[tuple[int, Use]]]] = defaultdict(lambda: defaultdict(list))
    shared = cache(lambda item: None if is_resident(plan, item) else unit_of(plan, item))
    for t, task in enumerate(tasks):
        for use in task.uses:
            if (unit := shared(use.item)) is not None:
                uses[unit.ring][unit].append((t, use))
    stays, sizes = [], {}
    for ring, of_ring in uses.items():
        slots = plan.slots.get(ring)
        assigned, sizes[ring] = _assign(ring, _Sweep(plan, tasks, ring, of_ring).run(slots), slots)
        stays += assigned
    return sorted(stays, key=lambda stay: stay.first), sizes


class _Sweep:
    """Goes through the uses of one ring in the order of time."""

    def __init__(self, plan: Plan, tasks: Sequence[Task], ring: str, uses: dict[Unit, list[tuple[int, Use]]]) -> None:
        self.plan, self.ring, self.uses = plan, ring, uses
        self.waits_for_forward = ring == "input"
        self.kinds = [task.kind for task in tasks]
        self.at: dict[int, list[Unit]] = defaultdict(list)
        for unit, of_unit in uses.items():
            for t in sorted({t for t, _ in of_unit}):
                self.at[t].append(unit)

    def run(self, slots: int | None) -> list[Stay]:
        """The stays in a ring of ``slots``; None means enough slots to copy nothing."""
        stays, most = self._sweep(None)
        if slots is not None and most > slots:
            stays, _ = self._sweep(slots)
        for stay in {stay.unit: stay for stay in stays}.values():  # the last of each unit
            stay.home = is_state(self.plan, stay.unit.item)
        return stays

    def _sweep(self, slots: int | None) -> tuple[list[Stay], int]:
        """The stays, and the largest number of units that are in slots at the same time."""
        room = None if slots is None else max(1, slots - (SPARE if self.ring not in GROUPED else 0))
        live: dict[Unit, Stay] = {}
        stays: list[Stay] = []
        most, position = 0, dict.fromkeys(self.uses, 0)
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
            most = max(most, len(live))
            if slots is not None and len(live) > slots:
                self._make_room(live, now, position, slots)
            for unit in now:
                if not self._needed_again(unit, position[unit]):
                    del live[unit]
            if room is not None and len(live) > room:
                self._make_room(live, [], position, room, must=False)
        return stays, most

    def _make_room(
        self, live: dict[Unit, Stay], now: list[Unit], position: dict[Unit, int], room: int, *, must: bool = True
    ) -> None:
        """End stays until at most ``room`` are left, except those of units in use."""
        while len(live) > room:
            free = [unit for unit in live if unit not in now and not self._stays(unit, position[unit])]
            if not free:
                if not must:
                    return
                raise TooFewSlotsError(f"{self.ring} needs {len(live)} slots, got {room}")
            victim = max(free, key=lambda unit: self.uses[unit][position[unit]][0])
            live.pop(victim).returns = True

    def _needed_again(self, unit: Unit, i: int) -> bool:
        """Whether the next use reads the contents instead of overwriting them; a sequence's first chunk decides."""
        if i == len(self.uses[unit]):
            return False
        use = self.uses[unit][i][1]
        return use.reads or use.item != unit.item

    def _stays(self, unit: Unit, i: int) -> bool:
        """Whether a unit may not leave: x on its way to the next layer, and gradients of activations."""
        if self.ring in ("dy", "dcontext"):
            return True
        return self.waits_for_forward and self.kinds[self.uses[unit][i][0]] in _TAKE_X


class _Slot(NamedTuple):
    """A slot that a stay may take; slots are ordered by how long they have been free, the longest first."""

    ready: int
    """The time from which it can be taken, after a copy out of it."""
    left: int
    """The time of its last use."""
    number: int


def _assign(ring: str, stays: list[Stay], slots: int | None) -> tuple[list[Stay], int]:
    """Gives each stay the slot that has been free the longest, or the slot that still holds its unit, which joins the
    two stays; returns the stays and the number of slots.
    """
    found: list[Stay] = []
    free: list[_Slot] = []  # in order
    lying: dict[Unit, tuple[_Slot, Stay]] = {}  # contents that a later stay reads, if the slot is not taken before
    for stay in sorted(stays, key=lambda stay: stay.first):
        left = lying.pop(stay.unit, None)
        if left is not None and left[0] in free:
            slot, earlier = left
            free.remove(slot)
            earlier.uses += stay.uses
            earlier.returns, earlier.home = stay.returns, stay.home
            stay = earlier
        else:
            usable = (slot for slot in free if slot.left < stay.first)
            taken = None if slots is not None and len(free) < slots else next(usable, None)
            if taken is None and len(free) == slots:
                raise TooFewSlotsError(f"{ring} needs more than {slots} slots")
            stay.slot = len(free) if taken is None else taken.number
            if taken is not None:
                free.remove(taken)
            found.append(stay)
        after = _Slot(stay.last + (EVICTION_LAG if stay.leaves else 0), stay.last, stay.slot)
        insort(free, after)
        if stay.returns:
            lying[stay.unit] = after, stay
    return found, len(free) if slots is None else slots
