"""A model that knows which slot and which place hold what: it finds what would go wrong in a schedule.

It shares no code with what builds schedules. Contents are (item, version): each kernel that writes an item makes a new
version, copies carry one along. In the order of the list every read must find the item's newest version. And any two
operations that use one slot or place, one of them writing, must be ordered by lanes and waits: then all that
lanes can do at once gives the same as the list one by one.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

from cs336_systems.costs.lanes import Lane
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.schedule import Held, Item, Kind, Operation, Place, Schedule, Slot

NOTHING = Item("nothing"), -1


class ScheduleError(AssertionError):
    """What would go wrong."""


def without_wait(schedule: Schedule, i: int, j: int) -> Schedule:
    """The schedule whose operation ``i`` does not wait for ``j``."""
    operations = list(schedule.operations)
    operations[i] = replace(operations[i], waits=tuple(k for k in operations[i].waits if k != j))
    return replace(schedule, operations=tuple(operations))


def check(plan: Plan, schedule: Schedule) -> None:
    """Raises ScheduleError if a step would read what is not there, or not yet, or no longer; or not be a whole step."""
    _Model(plan, schedule).run()


class _Model:
    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule = plan, schedule
        self.contents: dict[Slot | Place, tuple[Item, int]] = {}
        self.newest: Counter[Item] = Counter()
        self.done: Counter[tuple] = Counter()
        self.clocks: list[dict[Lane, int]] = []
        self.since_write: dict[Slot | Place, list[tuple[int, bool]]] = defaultdict(list)
        for item, where in (*schedule.slots.items(), *schedule.places.items()):
            self.contents[where] = item, 0

    def run(self) -> None:
        lanes: dict[Lane, int] = {}
        for i, operation in enumerate(self.schedule.operations):
            clock = dict(self.clocks[lanes[operation.lane]]) if operation.lane in lanes else {}
            for j in operation.waits:
                if j >= i:
                    raise ScheduleError(f"operation {i} waits for {j}")
                for lane, last in self.clocks[j].items():
                    clock[lane] = max(clock.get(lane, -1), last)
            self.access(i, operation, clock)
            clock[operation.lane] = i
            self.clocks.append(clock)
            lanes[operation.lane] = i
            if operation.kind is Kind.FETCH:
                assert operation.place is not None
                self.copy(operation, operation.place, operation.writes[0].slot, operation.writes[0])
            elif operation.kind is Kind.EVICT:
                assert operation.place is not None
                self.copy(operation, operation.reads[0].slot, operation.place, operation.reads[0])
            else:
                self.compute(operation)
        self.complete()

    def access(self, i: int, operation: Operation, clock: dict[Lane, int]) -> None:
        reads = {held.slot for held in operation.reads}
        writes: set[Slot | Place] = {held.slot for held in operation.writes}
        everything: set[Slot | Place] = reads | writes
        if operation.place is not None:
            everything |= {operation.place}
            writes |= {operation.place} if operation.kind is Kind.EVICT else set()
        for where in everything:
            of = self.schedule
            room = of.regions[where.region] if isinstance(where, Place) else of.rings[where.ring]
            items = [held.item for held in (*operation.reads, *operation.writes) if held.slot == where]
            too_large = any(self.plan.work.item_bytes(item.what) > room.item_bytes for item in items)
            if not 0 <= where.number < room.n_items or too_large:
                raise ScheduleError(f"{where} of {room.n_items} cannot hold {items}")
            for j, wrote in self.since_write[where]:
                other = self.schedule.operations[j]
                if (wrote or where in writes) and clock.get(other.lane, -1) < j:
                    raise ScheduleError(f"{operation.kind} {i} may run beside {other.kind} {j}: both use {where}")
            if where in writes:
                self.since_write[where] = []
            self.since_write[where].append((i, where in writes))

    def find(self, operation: Operation, where: Slot | Place, item: Item) -> None:
        found, expected = self.contents.get(where, NOTHING), (item, self.newest[item])
        if found != expected:
            raise ScheduleError(f"{operation.kind} of {item} finds {found} in {where}, not {expected}")

    def copy(self, operation: Operation, source: Slot | Place, to: Slot | Place, held: Held) -> None:
        self.find(operation, source, held.item)
        if operation.n_bytes != self.plan.work.item_bytes(held.item.what):
            raise ScheduleError(f"{operation.kind} of {held.item} copies {operation.n_bytes} bytes")
        self.contents[to] = held.item, self.newest[held.item]

    def compute(self, operation: Operation) -> None:
        if len({held.slot for held in operation.writes}) != len(operation.writes):
            raise ScheduleError(f"{operation.kind} writes two items into one slot")
        for held in operation.reads:
            self.find(operation, held.slot, held.item)
        reads, writes = ({held.item for held in of} for of in (operation.reads, operation.writes))
        needed, made = self.expected(operation)
        if (reads, writes) != (needed, made):
            raise ScheduleError(f"{operation.kind}: reads {reads ^ needed}, writes {writes ^ made} differ")
        for held in operation.writes:
            self.newest[held.item] += 1
            self.contents[held.slot] = held.item, self.newest[held.item]
        self.done[operation.kind, operation.layer, operation.round, operation.chunk] += 1

    def versions(self, operation: Operation, **expected: int) -> None:
        """How often those items of this operation have been written so far."""
        for what, n in expected.items():
            item = next(held.item for held in operation.reads if held.item.what == what)
            if self.newest[item] != n:
                raise ScheduleError(f"{operation.kind}: {item} was written {self.newest[item]} times, not {n}")

    def restores(self, layer: int) -> int:
        """How often x of a layer is written again: before its own backward and those of the layers above it, up to the
        next one whose x is kept; or once, if it stays since.
        """
        every, n_layers = self.plan.input_every, self.plan.work.config.n_layers
        if layer % every == 0 or layer >= n_layers:
            return 0
        groups_above = (n_layers - 1) // every - layer // every
        stays = self.plan.order == "sequential" and layer % every <= groups_above
        return 1 if stays else min(-layer % every, n_layers - layer)

    def gradients_down_to(self, layer: int) -> int:
        """How often dy of a chunk has been written here when the backward of a layer begins."""
        work, above = self.plan.work, range(layer, self.plan.work.config.n_layers)
        here = sum(work.owner(k) == work.rank for k in above[1:]) + work.has_head
        return here + sum(work.owner(k) == work.rank != work.owner(k + 1) for k in above)

    def message(self, operation: Operation) -> tuple[set[Item], set[Item]]:
        """The tensor that a message reads or writes: x of the layer that it goes to, or dy of that layer's chunk."""
        work, at = self.plan.work, (operation.layer, operation.round, operation.chunk)
        sends, item = operation.kind is Kind.SEND, (*operation.reads, *operation.writes)[0].item
        if item not in (Item("input", *at), Item("dy", 0, *at[1:])):
            raise ScheduleError(f"{operation.kind} of {item} at {at}")
        source = operation.layer + (1 if item.what == "dy" else -1)
        other, own = (operation.layer, source) if sends else (source, operation.layer)
        if (work.owner(other), work.owner(own)) != (operation.peer, work.rank) or operation.peer == work.rank:
            raise ScheduleError(f"{operation.kind} of {item} between ranks {work.rank} and {operation.peer}")
        if sends:
            n = 1 if item.what == "input" else self.gradients_down_to(own) + (own < work.config.n_layers)
            self.versions(operation, **{item.what: n})
        return ({item}, set()) if sends else (set(), {item})

    def expected(self, operation: Operation) -> tuple[set[Item], set[Item]]:
        """What each kernel reads and writes, and how far that must have come."""
        plan, layer, r, chunk = self.plan, operation.layer, operation.round, operation.chunk
        group = plan.work.chunks_per_sequence
        if operation.kind in (Kind.SEND, Kind.RECEIVE):
            return self.message(operation)
        at = layer, r, chunk
        first = chunk // group * group
        keys = {Item("context", layer, r, i) for i in range(first, chunk + 1)} if plan.work.is_long else set()
        own = {Item("context", *at)} & keys
        weights, x, products = Item("weights", layer), Item("input", *at), Item("products", *at)
        attention, dy = Item("attention", *at), Item("dy", 0, r, chunk)
        lora, state = plan.work.lora, {Item(name, layer) for name in plan.work.streamed_moments}
        gradients = set() if lora else {Item("gradients", layer)}
        uses_level = operation.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
        again = self.restores(layer)  # of this layer's x, by then
        statistics = {x} if again else set()  # of x, which come with x that is kept
        with_keys = bool(plan.work.is_long and not plan.keep_context and again)
        if uses_level and operation.level != plan.levels[layer][chunk]:
            raise ScheduleError(f"{operation.kind} of {at} at level {operation.level}")
        match operation.kind:
            case Kind.EMBED:
                return set(), {x}
            case Kind.FORWARD:
                self.versions(operation, weights=0, input=1)
                return {weights, x} | (keys - own), {x, attention, products, Item("input", layer + 1, r, chunk)} | own
            case Kind.HEAD:
                self.versions(operation, input=1)
                return {x}, {dy}
            case Kind.RESTORE:
                self.versions(operation, weights=0, attention=1)
                return {weights, x, attention}, {products, Item("input", layer + 1, r, chunk)}
            case Kind.KEYS:
                assert not plan.keep_context
                self.versions(operation, weights=0, input=2 + again)
                return {weights, x}, own | statistics
            case Kind.RECOMPUTE:
                self.versions(operation, weights=0, input=2 + again + with_keys)
                if operation.level == "attention":
                    return {weights, x, attention}, {products} | statistics
                assert operation.level == "input"
                return {weights, x} | keys, {attention, products} | statistics
            case Kind.BACKWARD:
                written = 1 if operation.level == "products" else 2 + self.restores(layer + 1)
                n_inputs = 2 + again + with_keys + bool(again)
                self.versions(operation, weights=0, input=n_inputs, dy=self.gradients_down_to(layer), products=written)
                so_far = r * plan.chunks + plan.chunks - 1 - chunk
                parts = {self.newest[item] for item in gradients} - {so_far}
                if parts or operation.accumulate != (so_far > 0):
                    raise ScheduleError(f"gradients of layer {layer} have {parts} parts, not {so_far}")
                sums = {Item("dcontext", layer, r, i) for i in range(first, chunk + 1)} if plan.work.is_long else set()
                old_sums = set() if (chunk + 1) % group == 0 else sums
                read = {weights, x, attention, products, dy} | keys | old_sums
                return read | (gradients if so_far else set()), {products, dy} | gradients | sums
            case Kind.EMBED_BACKWARD:
                self.versions(operation, dy=self.gradients_down_to(0) + 1)
                return {dy}, set()
            case Kind.NORM:
                self.versions(operation, **({} if lora else {"gradients": plan.rounds * plan.chunks}))
                return gradients, set()
            case Kind.OPTIMIZER:
                if layer < 0 or lora:  # whose adapters have no slots
                    return set(), set()
                self.versions(operation, gradients=plan.rounds * plan.chunks)
                return {*gradients, weights, *state}, {weights, *state}
        raise ScheduleError(f"{operation.kind} on the compute lane")

    def complete(self) -> None:
        """Whether everything was done once, and the next step finds what this one did."""
        plan, work = self.plan, self.plan.work
        expected: Counter[tuple] = Counter()
        for r in range(plan.rounds):
            for chunk in range(plan.chunks):
                if work.has_embedding:
                    expected[Kind.EMBED, 0, r, chunk] = 1
                    if not work.lora:
                        expected[Kind.EMBED_BACKWARD, 0, r, chunk] = 1
                if work.has_head:
                    expected[Kind.HEAD, work.config.n_layers, r, chunk] = 1
                for layer in work.layers:
                    expected[Kind.FORWARD, layer, r, chunk] = expected[Kind.BACKWARD, layer, r, chunk] = 1
                    if work.is_long and not plan.keep_context:
                        expected[Kind.KEYS, layer, r, chunk] = 1
                    if n := self.restores(layer):
                        expected[Kind.RESTORE, layer - 1, r, chunk] = n
                    if plan.levels[layer][chunk] != "products":
                        expected[Kind.RECOMPUTE, layer, r, chunk] = 1
                for one, two in pairwise(range(work.config.n_layers + 1)):
                    for source, target in ((one, two), (two, one)):
                        for own, other, kind in ((source, target, Kind.SEND), (target, source, Kind.RECEIVE)):
                            if work.owner(own) == work.rank != work.owner(other):
                                expected[kind, target, r, chunk] += 1
        for layer in (-1, *work.layers):
            expected[Kind.OPTIMIZER, layer, plan.rounds - 1, 0] = 1
            if plan.clipping and layer >= 0:
                expected[Kind.NORM, layer, plan.rounds - 1, 0] = 1
        if self.done != expected:
            raise ScheduleError(f"not a whole step: {(self.done - expected) + (expected - self.done)}")
        state = {Item(what, k) for k in work.layers for what in ("weights", *work.streamed_moments)}
        ends = dict(self.schedule.slots) | dict(self.schedule.places)
        if set(ends) != state:
            raise ScheduleError(f"state without a home: {state ^ set(ends)}")
        for item, where in ends.items():
            if self.contents.get(where) != (item, 0 if work.lora else 1):
                raise ScheduleError(f"the next step finds {self.contents.get(where)} in {where}, not the new {item}")
