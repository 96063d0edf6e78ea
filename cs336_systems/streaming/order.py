"""The kernels of a step in their order: a plan without its slots and copies.

Forward runs all chunks of a layer before the next layer; backward goes through layers and chunks in reverse. Sequential
rounds follow one another; interleaved rounds alternate the backward of round r at layer L - 1 - k with the forward of
round r + 1 at layer k: weights do not change inside a step, and the link is then used in both directions all the time.
Forward can lead by some more layers, so that one rank has backward work while another runs the head.

All ranks follow this one order, and each runs the part of its own layers. A message is sent right after the kernel that
wrote it and received at the same position of the order, so ranks cannot deadlock. The receiver stores the activations
between two layers.
"""

from collections.abc import Iterator
from typing import NamedTuple

from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.schedule import Item, Kind


class Use(NamedTuple):
    """How an operation uses an item; if it does not read the item, earlier contents are not needed."""

    item: Item
    reads: bool
    writes: bool


class Task(NamedTuple):
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
    """Only the forward of one round, for an evaluation."""
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
        else:  # k and v are kept: only q is recomputed
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
    """Restores x of a layer that has not kept it; intermediate products use the slots of forward's."""
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
    moments = tuple(Item(name, layer) for name in plan.work.streamed_moments)
    weights = () if plan.work.lora else (Item("weights", layer),)
    uses = _reads(*_gradients(plan, layer)) + _changes(*weights, *moments)
    return Task(Kind.OPTIMIZER, layer, plan.rounds - 1, 0, uses)
