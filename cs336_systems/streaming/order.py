"""The kernels of a step in their order, and which item lies in which slot meanwhile: a plan without its copies.

Forward goes layer by layer, all chunks of one before the next; backward descends through layers and chunks. Sequential
rounds follow one another; interleaved ones alternate the backward of round r at layer L - 1 - k with the forward of
round r + 1 at layer k: weights do not change inside a step, and the link then works both ways all the time. Forward can
lead by some layers more, so that one rank of a ring has backward to do while another has the head.

All ranks of a ring follow this one order, and each runs its own layers' part. A message is sent right after the kernel
that wrote it and received at the same place in the order, so ranks cannot wait for each other in a circle. What is
between two layers lies with the receiver.

An item that a ring has no room for leaves it between two uses and returns for the second. As the order is known, the
one that leaves is that whose next use is the farthest (Belady 1966): among items of one size the fewest copies. One
slot is left free for what comes next. A stay takes the slot that has been free the longest, so that copies have the
longest time: into it since it was left, out of it until it is taken.

Time is counted in kernels' operations and messages.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from cs336_systems.streaming.plan import STATE_RINGS, Plan
from cs336_systems.streaming.schedule import Item, Kind

SPARE = 1
"""Slots of a ring that hold nothing from one use to another, unless all fits: the next item comes in there."""
EVICTION_LAG = 2
"""Operations of kernels that a copy out of a slot is assumed to last: with fewer, steps are up to 9 % slower."""

GROUPED = ("context", "dcontext")
"""Rings in which the items of a sequence's chunks lie in neighbouring slots."""


@dataclass(frozen=True)
class Use:
    """How an operation uses an item; one that does not read it needs nothing of what it held before."""

    item: Item
    reads: bool
    writes: bool


@dataclass(frozen=True)
class Task:
    """One operation on the compute lane, before its items have slots."""

    kind: Kind
    layer: int
    round: int
    chunk: int
    uses: tuple[Use, ...]
    level: str = ""
    accumulate: bool = False
    peer: int = -1
    """The other rank of a message."""


def compute_order(plan: Plan) -> Iterator[Task]:
    """Yields a rank's kernels and messages of a step, in its order."""
    layers, last = range(plan.work.config.n_layers), plan.rounds - 1
    if plan.order == "sequential":
        for r in range(plan.rounds):
            for layer in layers:
                for chunk in range(plan.chunks):
                    yield from _forward(plan, layer, r, chunk)
            for layer in reversed(layers):
                for chunk in reversed(range(plan.chunks)):
                    yield from _backward(plan, layer, r, chunk)
                if r == last:
                    yield from _complete(plan, layer)
    else:
        depth = len(layers)
        for at in range(-depth - plan.lead, plan.rounds * depth):  # layers of backward since the step began
            (r, above), (following, layer) = divmod(at, depth), divmod(at + depth + plan.lead, depth)
            down = layers[-1 - above]
            for chunk in range(plan.chunks):
                if r >= 0:
                    yield from _backward(plan, down, r, plan.chunks - 1 - chunk)
                if following <= last:
                    yield from _forward(plan, layer, following, chunk)
            if r == last:
                yield from _complete(plan, down)
    yield Task(Kind.OPTIMIZER, -1, last, 0, ())
    if plan.clipping:
        for layer in plan.work.layers:
            yield _optimizer(plan, layer)


def forward_order(plan: Plan) -> Iterator[Task]:
    """The forward of one round by itself, for an evaluation."""
    for layer in range(plan.work.config.n_layers):
        for chunk in range(plan.chunks):
            yield from _forward(plan, layer, 0, chunk, learns=False)


def _reads(*items: Item) -> tuple[Use, ...]:
    return tuple(Use(item, reads=True, writes=False) for item in items)


def _writes(*items: Item) -> tuple[Use, ...]:
    return tuple(Use(item, reads=False, writes=True) for item in items)


def _changes(*items: Item) -> tuple[Use, ...]:
    return tuple(Use(item, reads=True, writes=True) for item in items)


def _before(plan: Plan, what: str, layer: int, r: int, chunk: int) -> tuple[Item, ...]:
    """The items of the chunks of the same sequence that come before this one."""
    first = chunk - chunk % plan.work.chunks_per_sequence
    return tuple(Item(what, layer, r, i) for i in range(first, chunk))


def _message(plan: Plan, source: int, target: int, item: Item) -> Iterator[Task]:
    """Sends or receives an item that goes from one layer to another, if their ranks differ; layer L is the head."""
    sender, receiver, own = plan.work.owner(source), plan.work.owner(target), plan.work.rank
    at = target, item.round, item.chunk
    if sender != receiver == own:
        yield Task(Kind.RECEIVE, *at, _writes(item), peer=sender)
    elif receiver != sender == own:
        yield Task(Kind.SEND, *at, _reads(item), peer=receiver)


def _forward(plan: Plan, layer: int, r: int, chunk: int, *, learns: bool = True) -> Iterator[Task]:
    """This rank's part, if any, in the forward of a layer and a chunk."""
    at, work, following = (layer, r, chunk), plan.work, Item("input", layer + 1, r, chunk)
    if work.owner(layer) == work.rank:
        yield from _own_forward(plan, *at)
    yield from _message(plan, layer, layer + 1, following)
    if layer == work.config.n_layers - 1:
        if work.has_head:
            uses = _reads(following) + (_writes(Item("dy", 0, r, chunk)) if learns else ())
            yield Task(Kind.HEAD if learns else Kind.LOSS, layer + 1, r, chunk, uses)
        if learns:
            yield from _message(plan, layer + 1, layer, Item("dy", 0, r, chunk))


def _own_forward(plan: Plan, layer: int, r: int, chunk: int) -> Iterator[Task]:
    at = layer, r, chunk
    if layer == 0:
        yield Task(Kind.EMBED, *at, _writes(Item("input", *at)))
    uses = _reads(Item("weights", layer)) + _changes(Item("input", *at))
    uses += _writes(Item("attention", *at), Item("products", *at), Item("input", layer + 1, r, chunk))
    if plan.work.is_long:
        uses += _writes(Item("context", *at)) + _reads(*_before(plan, "context", *at))
    yield Task(Kind.FORWARD, *at, uses, plan.levels[layer][chunk])


def _backward(plan: Plan, layer: int, r: int, chunk: int) -> Iterator[Task]:
    """This rank's part, if any, in the backward of a layer and a chunk."""
    if plan.work.owner(layer) == plan.work.rank:
        yield from _own_backward(plan, layer, r, chunk)
    if layer > 0:
        yield from _message(plan, layer, layer - 1, Item("dy", 0, r, chunk))


def _own_backward(plan: Plan, layer: int, r: int, chunk: int) -> Iterator[Task]:
    at, level = (layer, r, chunk), plan.levels[layer][chunk]
    is_long, last_of_sequence = plan.work.is_long, (chunk + 1) % plan.work.chunks_per_sequence == 0
    common = _reads(Item("weights", layer), Item("input", *at))
    restored = layer % plan.input_every > 0
    with_statistics = _changes if restored else _reads  # x that was restored has no statistics of the norms yet
    own, before = Item("context", *at), _before(plan, "context", *at)
    if is_long and not plan.keep_context:
        for item in (*before, own) if last_of_sequence else ():
            yield from _restore(plan, layer, r, item.chunk)
            x = with_statistics(Item("input", layer, r, item.chunk))
            yield Task(Kind.KEYS, layer, r, item.chunk, _reads(Item("weights", layer)) + x + _writes(item))
    else:
        yield from _restore(plan, *at)
    if level != "products":
        if level == "input":
            uses = _writes(Item("attention", *at)) + (_reads(own, *before) if is_long else ())
        else:  # k and v are there: q alone is recomputed
            uses = _reads(Item("attention", *at))
        uses += _reads(Item("weights", layer)) + with_statistics(Item("input", *at)) + _writes(Item("products", *at))
        yield Task(Kind.RECOMPUTE, *at, uses, level)
    uses = common + _reads(Item("attention", *at)) + _changes(Item("products", *at), Item("dy", 0, r, chunk))
    if is_long:
        sums = (*_before(plan, "dcontext", *at), Item("dcontext", *at))
        uses += _reads(own, *before) + (_writes(*sums) if last_of_sequence else _changes(*sums))
    accumulate = r > 0 or chunk < plan.chunks - 1
    uses += (_changes if accumulate else _writes)(*_gradients(plan, layer))
    yield Task(Kind.BACKWARD, *at, uses, level, accumulate)
    if layer == 0 and not plan.work.lora:
        yield Task(Kind.EMBED_BACKWARD, *at, _reads(Item("dy", 0, r, chunk)))


def _gradients(plan: Plan, layer: int) -> tuple[Item, ...]:
    """The gradients of a layer, unless they are its adapters', which have no slots."""
    return () if plan.work.lora else (Item("gradients", layer),)


def _restore(plan: Plan, layer: int, r: int, chunk: int) -> Iterator[Task]:
    """Restores x of a layer that has none; the products on the way lie where those of forward do."""
    for below in range(plan.restored_from(layer), layer):
        at = below, r, chunk
        uses = _reads(Item("weights", below), Item("input", *at), Item("attention", *at))
        uses += _writes(Item("products", *at), Item("input", below + 1, r, chunk))
        yield Task(Kind.RESTORE, *at, uses)


def _complete(plan: Plan, layer: int) -> Iterator[Task]:
    """The norm or the update that follows the last backward of a layer, on the rank that holds it."""
    if plan.work.owner(layer) != plan.work.rank:
        return
    if plan.clipping:
        yield Task(Kind.NORM, layer, plan.rounds - 1, 0, _reads(*_gradients(plan, layer)))
    else:
        yield _optimizer(plan, layer)


def _optimizer(plan: Plan, layer: int) -> Task:
    moments = tuple(Item(name, layer) for name, _ in plan.work.streamed_moments)
    weights = () if plan.work.lora else (Item("weights", layer),)
    uses = _reads(*_gradients(plan, layer)) + _changes(*weights, *moments)
    return Task(Kind.OPTIMIZER, layer, plan.rounds - 1, 0, uses)


_TAKE_X = (Kind.FORWARD, Kind.HEAD, Kind.LOSS, Kind.SEND)
"""Kinds of operations that read the x of the layer before."""


class Unit(NamedTuple):
    """A taker of a slot: an item, or in a grouped ring the items of one sequence, which take a slot each."""

    ring: str
    item: Item
    """The first item."""


@dataclass
class Stay:
    """A unit in one slot (or group of slots), from its first use there to its last."""

    unit: Unit
    uses: list[tuple[int, Use]] = field(default_factory=list)
    """Its uses, each with its time."""
    returns: bool = False
    """Whether a later stay reads what is there at the end of this one."""
    home: bool = False
    """Whether what was written must reach the host before the step ends, as state does whose home that is."""
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
    if item.what in dict(plan.work.streamed_moments):
        return "moments" if is_resident(plan, item) else "products"
    return item.what


def unit_of(plan: Plan, item: Item) -> Unit:
    if item.what in GROUPED:
        first = item.chunk - item.chunk % plan.work.chunks_per_sequence
        return Unit(item.what, Item(item.what, item.layer, item.round, first))
    return Unit(ring_of(plan, item), item)


def is_resident(plan: Plan, item: Item) -> bool:
    """Whether it has a slot of its own from step to step."""
    what = "moments" if item.what in dict(plan.work.streamed_moments) else item.what
    return item.layer in plan.resident_layers(what)


def is_state(plan: Plan, item: Item) -> bool:
    """Whether the next step begins with it."""
    return item.what == "weights" or item.what in dict(plan.work.streamed_moments)


def resident_slot(plan: Plan, item: Item) -> int:
    """The index in its ring; residents have the first ones."""
    if item.what in STATE_RINGS:
        return plan.resident_layers(item.what).index(item.layer)
    names = [name for name, _ in plan.work.streamed_moments]
    return plan.resident_layers("moments").index(item.layer) * len(names) + names.index(item.what)


def find_stays(plan: Plan, tasks: Sequence[Task]) -> tuple[list[Stay], dict[str, int]]:
    """All stays in shared slots, in the order in which they begin; and the slots of each ring, in units.

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
        """The stays in so many slots; None for as many as it takes to copy nothing."""
        stays, most = self._sweep(None)
        if slots is not None and most > slots:
            stays, _ = self._sweep(slots)
        for stay in {stay.unit: stay for stay in stays}.values():  # the last of each unit
            stay.home = is_state(self.plan, stay.unit.item)
        return stays

    def _sweep(self, slots: int | None) -> tuple[list[Stay], int]:
        """The stays, and the most units that lie in slots at one time."""
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
        """Ends stays until so many are left, none of a unit that is used now."""
        while len(live) > room:
            free = [unit for unit in live if unit not in now and not self._stays(unit, position[unit])]
            if not free:
                if not must:
                    return
                raise TooFewSlotsError(f"{self.ring} needs {len(live)} slots, got {room}")
            victim = max(free, key=lambda unit: self.uses[unit][position[unit]][0])
            live.pop(victim).returns = True

    def _needed_again(self, unit: Unit, i: int) -> bool:
        """Whether a later use reads what lies there, instead of writing it anew, a sequence with its first chunk."""
        if i == len(self.uses[unit]):
            return False
        use = self.uses[unit][i][1]
        return use.reads or use.item != unit.item

    def _stays(self, unit: Unit, i: int) -> bool:
        """Whether a unit may not leave: x on its way to the next layer, and gradients of activations."""
        if self.ring in ("dy", "dcontext"):
            return True
        return self.waits_for_forward and self.kinds[self.uses[unit][i][0]] in _TAKE_X


@dataclass(frozen=True, order=True)
class _Slot:
    """A slot that a stay may take."""

    ready: int
    """The time from which it can be taken, after a copy out of it."""
    left: int
    """The time of its last use."""
    index: int
    stay: Stay | None = field(default=None, compare=False)
    """The last stay there."""


def _assign(ring: str, stays: list[Stay], slots: int | None) -> tuple[list[Stay], int]:
    """Gives each stay the slot that has been free the longest, or the one where its unit still lies, which joins the
    two; returns the stays, and how many slots there are.
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
