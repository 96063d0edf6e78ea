"""The kernels of a step in their order, each with the items that it reads and writes: a plan before memory is assigned.

Forward goes layer by layer, all chunks of one before the next; backward descends through layers and chunks. Sequential
rounds follow one another; interleaved ones run the backward of round r at layer L - 1 - k in turn with the forward of
round r + 1 at layer k: weights do not change inside a step, and the link then works both ways all the time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cs336_systems.streaming.plan import Plan, restored_from
from cs336_systems.streaming.schedule import Item, Kind


@dataclass(frozen=True)
class Use:
    """Of an item by an operation."""

    item: Item
    reads: bool
    writes: bool

    @property
    def creates(self) -> bool:
        """Whatever the item held before is not needed."""
        return not self.reads


@dataclass(frozen=True)
class Step:
    """One operation on the compute lane."""

    kind: Kind
    layer: int
    round: int
    chunk: int
    uses: tuple[Use, ...]
    level: str = ""
    accumulate: bool = False


def compute_order(plan: Plan) -> Iterator[Step]:
    """Everything that computes, in its order."""
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
        for r in range(-1, plan.rounds):
            for layer in layers:
                down = layers[-1 - layer]
                for chunk in range(plan.chunks):
                    if r >= 0:
                        yield from _backward(plan, down, r, plan.chunks - 1 - chunk)
                    if r < last:
                        yield from _forward(plan, layer, r + 1, chunk)
                if r == last:
                    yield from _complete(plan, down)
    yield Step(Kind.OPTIMIZER, -1, last, 0, ())
    if plan.clipping:
        for layer in layers:
            yield _optimizer(plan, layer)


def forward_order(plan: Plan) -> Iterator[Step]:
    """Of one round's forward by itself, for an evaluation."""
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
    """Of the chunks of the same sequence that come before this one."""
    first = chunk - chunk % plan.work.chunks_per_sequence
    return tuple(Item(what, layer, r, i) for i in range(first, chunk))


def _forward(plan: Plan, layer: int, r: int, chunk: int, *, learns: bool = True) -> Iterator[Step]:
    at = layer, r, chunk
    if layer == 0:
        yield Step(Kind.EMBED, *at, _writes(Item("input", *at)))
    uses = _reads(Item("weights", layer)) + _changes(Item("input", *at))
    uses += _writes(Item("attention", *at), Item("products", *at), Item("input", layer + 1, r, chunk))
    if plan.work.is_long:
        uses += _writes(Item("context", *at)) + _reads(*_before(plan, "context", *at))
    yield Step(Kind.FORWARD, *at, uses, plan.level(*at))
    if layer == plan.work.config.n_layers - 1:
        head = _reads(Item("input", layer + 1, r, chunk)) + (_writes(Item("dy", 0, r, chunk)) if learns else ())
        yield Step(Kind.HEAD if learns else Kind.LOSS, layer + 1, r, chunk, head)


def _backward(plan: Plan, layer: int, r: int, chunk: int) -> Iterator[Step]:
    at, level = (layer, r, chunk), plan.level(layer, r, chunk)
    is_long, last_of_sequence = plan.work.is_long, (chunk + 1) % plan.work.chunks_per_sequence == 0
    common = _reads(Item("weights", layer), Item("input", *at))
    restored = layer % plan.input_every > 0
    with_statistics = _changes if restored else _reads  # of x, which x that is restored lacks
    own, before = Item("context", *at), _before(plan, "context", *at)
    if is_long and not plan.keep_context:
        for item in (*before, own) if last_of_sequence else ():
            yield from _restore(plan, layer, r, item.chunk)
            x = with_statistics(Item("input", layer, r, item.chunk))
            yield Step(Kind.KEYS, layer, r, item.chunk, _reads(Item("weights", layer)) + x + _writes(item))
    else:
        yield from _restore(plan, *at)
    if level != "products":
        if level == "input":
            uses = _writes(Item("attention", *at)) + (_reads(own, *before) if is_long else ())
        else:  # q alone is computed again where k and v are there
            uses = _reads(Item("attention", *at))
        uses += _reads(Item("weights", layer)) + with_statistics(Item("input", *at)) + _writes(Item("products", *at))
        yield Step(Kind.RECOMPUTE, *at, uses, level)
    uses = common + _reads(Item("attention", *at)) + _changes(Item("products", *at), Item("dy", 0, r, chunk))
    if is_long:
        sums = (*_before(plan, "dcontext", *at), Item("dcontext", *at))
        uses += _reads(own, *before) + (_writes(*sums) if last_of_sequence else _changes(*sums))
    accumulate = r > 0 or chunk < plan.chunks - 1
    uses += (_changes if accumulate else _writes)(Item("gradients", layer))
    yield Step(Kind.BACKWARD, *at, uses, level, accumulate)
    if layer == 0:
        yield Step(Kind.EMBED_BACKWARD, *at, _reads(Item("dy", 0, r, chunk)))


def _restore(plan: Plan, layer: int, r: int, chunk: int) -> Iterator[Step]:
    """x of a layer that has none; the products on the way lie where those of forward do."""
    for below in range(restored_from(layer, plan.work.config.n_layers, plan.input_every, plan.order), layer):
        at = below, r, chunk
        uses = _reads(Item("weights", below), Item("input", *at), Item("attention", *at))
        uses += _writes(Item("products", *at), Item("input", below + 1, r, chunk))
        yield Step(Kind.RESTORE, *at, uses)


def _complete(plan: Plan, layer: int) -> Iterator[Step]:
    """What follows the last backward of a layer."""
    if plan.clipping:
        yield Step(Kind.NORM, layer, plan.rounds - 1, 0, _reads(Item("gradients", layer)))
    else:
        yield _optimizer(plan, layer)


def _optimizer(plan: Plan, layer: int) -> Step:
    moments = tuple(Item(name, layer) for name, _ in plan.work.moments)
    uses = _reads(Item("gradients", layer)) + _changes(Item("weights", layer), *moments)
    return Step(Kind.OPTIMIZER, layer, plan.rounds - 1, 0, uses)
