"""The plan of a step under memory caps: all decisions about it, and the bytes that follow from them.

    plan = choose(config, context_length, Caps(24 * GIB, 75 * GIB), rates).plan    # choose.py
    schedule = build(plan)                                                         # build.py

A step is ``rounds`` times forward and backward over ``chunks`` chunks of tokens, and then the optimizer. The state of a
layer (weights, gradients, moments) is resident, in its own slots, or streams through a ring of slots. Resident layers
are spread over the model, so that traffic on the link is even. Activations kept for backward go through rings, too. A
ring has at least the slots that copies and kernels need to overlap; the rest of ``ring_bytes`` holds kept activations,
an equal fraction of each kind, and those without a slot stay on the host until backward needs them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from cs336_systems.config import check_known
from cs336_systems.costs.streaming import StreamedWork

Order = Literal["sequential", "interleaved"]
ORDERS: tuple[Order, ...] = ("sequential", "interleaved")

STATE_RINGS = ("weights", "gradients")
RESIDENTS = (*STATE_RINGS, "moments")
"""The parts of a layer's state that may be resident."""

LEAST_SLOTS: dict[Order, dict[str, int]] = {
    "sequential": {"weights": 2, "gradients": 2, "input": 2, "context": 1, "attention": 2, "products": 2},
    "interleaved": {"weights": 4, "gradients": 2, "input": 4, "context": 2, "attention": 3, "products": 3},
}
"""The fewest slots of a ring with which copies and kernels still overlap. ``input`` has one more for each chunk;
``context`` is counted in sequences."""


class Keep(NamedTuple):
    """How many (layer, chunk) pairs of a round keep a level of ``costs/kept.py`` or more; all keep ``input``."""

    attention: int
    products: int


@dataclass(frozen=True)
class Plan:
    """The decisions of a step.

    Raises:
        ValueError: a number is out of range, the order is unknown, or x is to be restored from what is not kept.
    """

    work: StreamedWork
    chunks: int
    """Chunks of a round."""
    rounds: int
    """Rounds of a step."""
    order: Order
    keep: Keep
    weights: int = 0
    """Layers whose weights never leave the device."""
    gradients: int = 0
    """Layers whose gradients never leave the device."""
    moments: int = 0
    """Layers whose moments never leave the device."""
    keep_context: bool = True
    """Whether k and v of sequences longer than a chunk are kept; if not, backward recomputes them."""
    input_every: int = 1
    """n: every n-th layer, beginning with the first, keeps x. The x of other layers is restored, that is, recomputed
    from x and attention's outputs kept by the layers below, down to one with x. No pair keeps products then."""
    clipping: bool = True
    """Whether gradients are clipped by their global norm, for which the optimizer waits for the end of backward."""
    ring_bytes: int | None = None
    """Device memory for all slots; None means enough slots to copy nothing."""
    table_share: float = 0.0
    """Device memory that page tables take for each byte on the host."""
    lead: int = 0
    """In interleaved rounds, the layers by which forward is more than one round ahead of the concurrent backward."""

    def __post_init__(self) -> None:
        check_known("order", self.order, ORDERS)
        if self.input_every < 1 or (self.input_every > 1 and not self.work.restores):
            alone = "" if self.work.restores else ", and 1 where x is not restored"
            raise ValueError(f"input_every must be at least 1{alone}, got {self.input_every}")
        if not 0 <= self.lead < (self.work.config.n_layers if self.order == "interleaved" else 1):
            raise ValueError(f"forward cannot lead by {self.lead} layers in {self.order} rounds")
        if self.rounds < 1 or self.chunks < 1 or self.chunks % self.work.chunks_per_sequence:
            whole = f", in whole sequences of {self.work.chunks_per_sequence}" if self.work.is_long else ""
            raise ValueError(f"rounds and chunks must be positive{whole}, got {self.rounds} and {self.chunks}")
        least, most = self.keep_bounds
        within = all(low <= n <= high for low, n, high in zip(least, self.keep, most, strict=True))
        if not within or self.keep.products > self.keep.attention:
            raise ValueError(f"a plan of this kind keeps from {least} to {most}, got {self.keep}")
        for what in RESIDENTS:
            if not 0 <= (layers := getattr(self, what)) <= self.n_layers * (what in self.work.states):
                raise ValueError(f"{layers} layers cannot have resident {what}, of {self.n_layers}")

    @property
    def n_layers(self) -> int:
        """The number of layers on this rank."""
        return len(self.work.layers)

    @property
    def pairs(self) -> int:
        """Pairs of layer and chunk in a round."""
        return self.chunks * self.n_layers

    @property
    def round_tokens(self) -> int:
        return self.work.chunk * self.chunks

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.round_tokens * self.rounds

    @property
    def round_sequences(self) -> int:
        return self.round_tokens // self.work.context_length

    @property
    def n_sequences(self) -> int:
        """Sequences of a step."""
        return self.round_sequences * self.rounds

    def token_slice(self, round: int, chunk: int) -> slice:
        """A chunk's tokens among those of the step, sequence after sequence."""
        first = (round * self.chunks + chunk) * self.work.chunk
        return slice(first, first + self.work.chunk)

    # what is kept

    @cached_property
    def keep_bounds(self) -> tuple[Keep, Keep]:
        """The least and the most that a round can keep."""
        sources = sum(self.is_source(layer) for layer in range(self.n_layers))
        return Keep(sources * self.chunks, 0), Keep(self.pairs, self.pairs if self.input_every == 1 else 0)

    @cached_property
    def levels(self) -> list[list[str]]:
        """The levels of ``costs/kept.py`` that a round keeps, by layer, then chunk; none for layers of other ranks.

        They are spread evenly over this rank's layers, except that sources keep attention first.
        """
        keep, sources = self.keep, self.keep_bounds[0].attention
        n_attention, n_others = keep.attention - keep.products - sources, self.pairs - keep.products - sources

        def chosen(i: int, n: int, of: int) -> bool:
            return (i + 1) * n // of > i * n // of

        levels: list[list[str]] = [[] for _ in range(self.work.config.n_layers)]
        others = 0
        for i in range(self.pairs):
            layer = self.work.layers[i // self.chunks]
            if chosen(i, keep.products, self.pairs):
                levels[layer].append("products")
            elif self.is_source(layer):
                levels[layer].append("attention")
            else:
                levels[layer].append("attention" if chosen(others, n_attention, n_others) else "input")
                others += 1
        return levels

    def is_source(self, layer: int) -> bool:
        """Whether x of the next layer is restored from what this one keeps."""
        return layer + 1 < self.work.config.n_layers and (layer + 1) % self.input_every > 0

    def restored_from(self, layer: int) -> int:
        """The layer from whose x that of ``layer`` is restored before its backward; itself if its x is available.

        The x that a group's last layer has restored on the way stays for the layers below it if there is room: in
        sequential rounds, the room of the groups above and of their kept x; in interleaved rounds, the next round uses
        that room.
        """
        first, depth = layer - layer % self.input_every, self.work.config.n_layers
        if layer == min(first + self.input_every, depth) - 1:
            return first
        groups_above = (depth - 1) // self.input_every - layer // self.input_every
        return min(layer, first + (groups_above if self.order == "sequential" else 0))

    @cached_property
    def restores(self) -> int:
        """Operations of kind ``restore`` for one chunk of a round."""
        return sum(layer - self.restored_from(layer) for layer in range(self.n_layers))

    def kept_counts(self, keep: Keep) -> dict[str, int]:
        """The number of slots, by ring, that the activations kept in a round would fill."""
        context = {"context": self.pairs // self.work.chunks_per_sequence} if self._keeps_context else {}
        inputs = math.ceil(self.n_layers / self.input_every) * self.chunks
        return {"input": inputs, **context, "attention": keep.attention, "products": keep.products}

    @property
    def _keeps_context(self) -> bool:
        return self.work.is_long and self.keep_context

    # bytes on the device

    def resident_layers(self, what: str) -> tuple[int, ...]:
        """The layers of which this is resident, spread evenly; none for what never is."""
        n = getattr(self, what) if what in RESIDENTS else 0
        return tuple(self.work.layers[(2 * i + 1) * self.n_layers // (2 * n)] for i in range(n))

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of what the optimizer keeps of a layer."""
        return sum(map(self.work.item_bytes, self.work.streamed_moments))

    @cached_property
    def slot_bytes(self) -> dict[str, int]:
        """Bytes of a slot of each ring that layers share; ``context`` of a whole sequence."""
        found = {ring: self.work.item_bytes(ring) for ring in LEAST_SLOTS[self.order]}
        found["context"] *= self.work.chunks_per_sequence
        if self.moments < self.n_layers:
            found["products"] = max([found["products"], *map(self.work.item_bytes, self.work.streamed_moments)])
        return found

    @cached_property
    def least_slots(self) -> dict[str, int]:
        """Slots of each ring that layers share, without room for what waits for backward."""
        found = dict(LEAST_SLOTS[self.order])
        found["input"] += self.chunks
        found["weights"] = min(found["weights"] + self.input_every - 1, self.n_layers - self.weights)
        found["gradients"] = min(found["gradients"], self.n_layers - self.gradients)
        if self.moments < self.n_layers:
            found["products"] = max(found["products"], len(self.work.streamed_moments))
        if not self.work.is_long:
            del found["context"]
        return found

    @cached_property
    def slots(self) -> dict[str, int]:
        """Slots of each ring that layers share, ``context`` in sequences; without a ring, as many as it needs."""
        if self.ring_bytes is None:
            return {}
        share, counts = self.share_on_device(self.keep), self.kept_counts(self.keep)
        return {ring: n + int(share * counts.get(ring, 0)) for ring, n in self.least_slots.items()}

    @cached_property
    def least_ring_bytes(self) -> int:
        """Bytes of all rings at their smallest."""
        work = self.work
        resident = self.weights * work.layer_bytes + self.gradients * work.item_bytes("gradients")
        resident += self.moments * self.moment_bytes
        sums = work.item_bytes("dcontext") * work.chunks_per_sequence if work.is_long else 0
        fixed = resident + sums + self._dy_slots * work.item_bytes("dy")
        return fixed + sum(n * self.slot_bytes[ring] for ring, n in self.least_slots.items())

    @property
    def _dy_slots(self) -> int:
        """Slots of ``dy``: twice the chunks if the head writes it while backward of the previous round still runs."""
        work, last = self.work, self.work.config.n_layers
        from_head = work.rank in (work.owner(last - 1), work.owner(last))
        return self.chunks * (2 if from_head and self.lead and min(work.layers) <= self.lead else 1)

    def least_bytes(self, keep: Keep) -> int:
        """Bytes of the device with all rings at their smallest: all that is kept lies on the host, by page tables."""
        on_host = self.host_state_bytes + self.kept_bytes(keep) + self._in_flight_bytes(keep)
        return self.least_ring_bytes + math.ceil(self.table_share * on_host)

    def share_on_device(self, keep: Keep) -> float:
        """The fraction of kept activations that have a slot until backward, and so need no page tables."""
        assert self.ring_bytes is not None
        kept = self.kept_bytes(keep)
        if self.ring_bytes - self.least_ring_bytes - self.table_share * self.host_state_bytes >= kept:
            return 1.0
        left = self.ring_bytes - self.least_bytes(keep)
        return max(0.0, min(1.0, left / (kept * (1 - self.table_share))))

    def kept_bytes(self, keep: Keep) -> int:
        """Bytes of the slots that the activations kept in a round would fill."""
        return sum(n * self.slot_bytes[ring] for ring, n in self.kept_counts(keep).items())

    # bytes on the host

    @cached_property
    def updated_bytes(self) -> int:
        """Bytes of weights and moments that stream, which an optimizer updates unless adapters are trained."""
        layers = (self.n_layers - self.weights) * self.work.layer_bytes
        return layers + (self.n_layers - self.moments) * self.moment_bytes

    @cached_property
    def host_state_bytes(self) -> int:
        return self.updated_bytes + (self.n_layers - self.gradients) * self.work.item_bytes("gradients")

    def _in_flight_bytes(self, keep: Keep) -> int:
        """Bytes on the host beyond what is kept there: while two rounds overlap, one more place of each region."""
        if self.order == "sequential":
            return 0
        return sum(self.slot_bytes[ring] for ring, n in self.kept_counts(keep).items() if n)

    def host_bytes(self, keep: Keep) -> int:
        """Bytes of the host's slab."""
        share = self.share_on_device(keep)
        if share == 1:
            return self.host_state_bytes
        kept = sum(int((1 - share) * n) * self.slot_bytes[ring] for ring, n in self.kept_counts(keep).items())
        return self.host_state_bytes + kept + self._in_flight_bytes(keep)

    def evicted_bytes(self, keep: Keep) -> float:
        """Bytes of kept activations that a round sends to the host and fetches back."""
        work = self.work
        kept = sum(
            n * work.item_bytes(ring) * (work.chunks_per_sequence if ring == "context" else 1)
            for ring, n in self.kept_counts(keep).items()
        )
        return (1 - self.share_on_device(keep)) * kept
