"""A step under memory caps as data: operations on three lanes, the slots they use, and the events they wait for.

A step is R rounds and the optimizer; a round is forward and backward over chunks of tokens. One list holds all
operations in the order in which one thread enqueues them; each lane (``in``, ``compute``, ``out``) runs its own
operations in that order. An operation begins when the earlier operations of its lane, and those that it waits for, have
ended; the latter are always earlier in the list, so one pass enqueues everything. The same list is executed, simulated
and checked.

    for i, operation in enumerate(schedule.operations):
        for j in operation.waits:
            streams[operation.lane].wait_event(events[j])
        run(operation)
        events[i].record(streams[operation.lane])

Device memory consists of rings of equal slots, host memory of regions of equal places. They contain items:

    weights, gradients        of a layer; weights alone where adapters are trained, which have no slots
    exp_avg, exp_avg_sq, ...  of a layer: what the optimizer keeps, an item each
    input                     of (layer, round, chunk): x, and both norms' statistics; layer L is the head's input.
                              Embed or the forward of the layer before writes x, the layer's own forward the statistics
    context                   k and v, rotated; only where a sequence is longer than a chunk (else they are of products)
    attention                 attention's output and its log-sum-exp
    products                  q (or q | k | v), residual, gate | up; backward may write over it
    dy                        of (round, chunk): the stream's gradient; head writes it, each backward writes over it
    dcontext                  of (layer, round, chunk): dk and dv, summed over the chunks that attend to this one

A level of ``costs/kept.py`` says which of these a (layer, chunk) keeps until backward: ``input``; also ``attention``;
or also ``products``. Forward writes all of them into slots; backward reads all of them from slots, after the
``recompute`` just before it has written those that were not kept. ``context`` is kept for all chunks or for none: a
layer's backward needs the context of whole sequences, so ``keys`` of all their chunks run first. If a layer's ``input``
is not kept, ``restore`` writes x, and the following ``keys`` and ``recompute`` write the norms' statistics. Embedding,
head and final norm never move and have no slots.

If ``context`` is a separate item, k and v are computed by a separate matmul (``blocks/saved.py``: ``APART``), so that
they round in recomputation as in forward.

Slots of ``context`` and ``dcontext`` form groups of consecutive memory, with a slot for each chunk of a sequence: chunk
c of a sequence is in slot g G + c, so that a sequence's keys are one tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cs336_systems.costs.lanes import Lane


class Kind(StrEnum):
    FETCH = "fetch"
    """Copies an item from its place on the host into a slot."""
    EVICT = "evict"
    """Copies an item from its slot to its place on the host."""
    EMBED = "embed"
    """Writes x of a chunk into ``input`` of layer 0."""
    FORWARD = "forward"
    """Runs a layer on a chunk: writes statistics, (context,) attention, products, and x of the next layer."""
    HEAD = "head"
    """Runs final norm, head and loss of a chunk with the gradients of all three; writes dy."""
    LOSS = "loss"
    """Replaces ``head`` if no backward follows: computes only the loss."""
    RESTORE = "restore"
    """Recomputes x of the next layer for a chunk, from a layer's x and attention's output."""
    KEYS = "keys"
    """Recomputes ``context`` of a layer and a chunk of a long sequence before the layer's backward, and of x that was
    restored the first norm's statistic."""
    RECOMPUTE = "recompute"
    """Recomputes the activations that the level of a layer and a chunk does not keep."""
    BACKWARD = "backward"
    """Runs the backward of a layer on a chunk, from dy to dy; adds to the layer's gradients."""
    EMBED_BACKWARD = "embed backward"
    """Adds dy of a chunk to the embedding's gradient."""
    NORM = "norm"
    """Takes a layer's part of the global norm, once its gradients are complete."""
    OPTIMIZER = "optimizer"
    """Updates a layer; layer -1 stands for embedding, head and final norm."""
    SEND = "send"
    """Sends x or dy of a chunk to the rank that holds the operation's layer; layer L is the head."""
    RECEIVE = "receive"
    """Receives x or dy of a chunk for the operation's layer, or for the head."""


RECOMPUTES = (Kind.RESTORE, Kind.KEYS, Kind.RECOMPUTE)
"""Kinds of operations that recompute results of forward."""

BACKWARDS = (Kind.BACKWARD, Kind.EMBED_BACKWARD)
"""The last operation of a rank's round is of one of these kinds."""

_LANES = {Kind.FETCH: Lane.IN, Kind.EVICT: Lane.OUT, Kind.SEND: Lane.SEND, Kind.RECEIVE: Lane.RECEIVE}
"""The lane of each kind that does not compute."""


def lane_of(kind: Kind) -> Lane:
    """The lane on which operations of a kind run."""
    return _LANES.get(kind, Lane.COMPUTE)


class Item(NamedTuple):
    """The contents of a slot or a place: for a layer's state only the layer counts, for dy only round and chunk."""

    what: str
    layer: int = 0
    round: int = 0
    chunk: int = 0


class Slot(NamedTuple):
    """Memory of one item on the device."""

    ring: str
    number: int


class Place(NamedTuple):
    """Memory of one item on the host."""

    region: str
    number: int
    where: str = "host"
    """Distinguishes it from the slot of the same name and number, as tuples with equal fields are equal."""


class Held(NamedTuple):
    """An item in its slot, as an operation reads or writes it."""

    item: Item
    slot: Slot


@dataclass(frozen=True)
class Operation:
    """One copy, or the kernels of one layer and chunk."""

    kind: Kind
    layer: int
    round: int
    chunk: int
    """Counted from 0 over all sequences of the round."""
    reads: tuple[Held, ...]
    writes: tuple[Held, ...]
    """An item that is read and written in one slot is in both lists."""
    waits: tuple[int, ...]
    """Indices in the schedule of operations on other lanes."""
    place: Place | None = None
    """The host's side of a copy."""
    n_bytes: int = 0
    """Bytes that a copy or a message moves."""
    level: str = ""
    """The level that this (layer, chunk) keeps, one of ``costs/kept.py``: set for forward, recompute and backward."""
    accumulate: bool = False
    """Whether this backward adds to sums of earlier chunks or rounds in the gradients' slot."""
    peer: int = -1
    """The other rank of a message."""

    @property
    def lane(self) -> Lane:
        return lane_of(self.kind)

    @property
    def meets(self) -> bool:
        """Whether all ranks of a ring do this together: here they sum their norms and losses."""
        return self.kind is Kind.OPTIMIZER and self.layer < 0

    def slot(self, what: str, chunk: int | None = None, layer: int | None = None) -> Slot:
        """The slot of an item that this operation uses; of several items, the one of a chunk or a layer.

        Raises:
            KeyError: it uses no such item.
        """
        for held in (*self.reads, *self.writes):
            item = held.item
            if item.what == what and chunk in (None, item.chunk) and layer in (None, item.layer):
                return held.slot
        raise KeyError(what)


@dataclass(frozen=True)
class Room:
    """Memory for several items of one size: the slots of a ring, or the places of a region."""

    n_items: int
    item_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.n_items * self.item_bytes


@dataclass(frozen=True)
class Schedule:
    """One step; the next begins from the same slots and places."""

    operations: tuple[Operation, ...]
    """In the order in which one thread enqueues them; none waits for a later one."""
    rings: Mapping[str, Room]
    regions: Mapping[str, Room]
    slots: Mapping[Item, Slot]
    """State that stays in its slot from step to step: weights, gradients and moments of resident layers."""
    places: Mapping[Item, Place]
    """State that is on the host before and after the step."""

    def of(self, lane: Lane) -> list[int]:
        """The indices of a lane's operations, in its order."""
        return [i for i, operation in enumerate(self.operations) if operation.lane is lane]
