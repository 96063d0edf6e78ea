"""What a layout would hold and how long its step would take, before any schedule is built: sums over one round.

A layout fixes chunks, order and residents; what is left of the device goes to slots for what forward keeps, in equal
shares of each of its parts. Levels are raised in one order, best bytes first: attention's output of all pairs of
(layer, chunk), then products. Time is that of the slowest lane in each phase: forward and backward if rounds are
sequential, both together if they are interleaved, but for the beginning of the first and the end of the last one.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from cs336_systems.costs.streaming import Rates, StreamedWork
from cs336_systems.streaming.plan import Order, is_source, restored_from

LEAST_SLOTS: dict[Order, dict[str, int]] = {
    "sequential": {"weights": 2, "gradients": 2, "input": 2, "context": 1, "attention": 2, "products": 2},
    "interleaved": {"weights": 4, "gradients": 2, "input": 4, "context": 2, "attention": 3, "products": 3},
}
"""With which copies and kernels still overlap; ``input`` beside a slot for each chunk, ``context`` in sequences."""
SHARPNESS = 8
"""Of the corner between a step that kernels bound and one that the link bounds: 9 % where both take the same time, as
simulated steps do."""
IN_FLIGHT = 1
"""Places of a region beyond what is kept, while two rounds overlap."""


@dataclass(frozen=True)
class Levels:
    """How many pairs of (layer, chunk) keep at least attention's output, and how many of them products too."""

    attention: int
    products: int


def level_steps(least: Levels, most: Levels) -> list[Levels]:
    """From input to attention, then to products, in sixteen steps each."""
    attention, products = (
        sorted({low + (high - low) * i // 16 for i in range(17)})
        for low, high in ((least.attention, most.attention), (least.products, most.products))
    )
    return [Levels(n, least.products) for n in attention] + [Levels(most.attention, n) for n in products[1:]]


@dataclass(frozen=True)
class Layout:
    """Without levels."""

    work: StreamedWork
    seconds: "WorkSeconds"
    chunks: int
    order: Order
    weights: int
    """Layers whose weights are resident."""
    gradients: int
    moments: int
    keep_context: bool = True
    input_every: int = 1
    """As of ``Plan``."""
    table_share: float = 0.0
    """Of what lies on the host, the device's page tables."""
    more_slots: tuple[tuple[str, int], ...] = ()
    """Of a ring, beyond the least."""

    @property
    def pairs(self) -> int:
        return self.chunks * self.work.config.n_layers

    @property
    def tokens(self) -> int:
        """Of a round."""
        return self.chunks * self.work.chunk

    @cached_property
    def level_bounds(self) -> tuple[Levels, Levels]:
        """The least and the most that can be kept."""
        n_layers, every = self.work.config.n_layers, self.input_every
        sources = sum(is_source(layer, n_layers, every) for layer in range(n_layers))
        return Levels(sources * self.chunks, 0), Levels(self.pairs, self.pairs if every == 1 else 0)

    @cached_property
    def moment_bytes(self) -> int:
        return sum(self.work.item_bytes(name) for name, _ in self.work.moments)

    @cached_property
    def slot_bytes(self) -> dict[str, int]:
        """Of the rings that layers share, a sequence's ``context`` as one."""
        work, n_layers = self.work, self.work.config.n_layers
        found = {ring: work.item_bytes(ring) for ring in LEAST_SLOTS[self.order]}
        found["context"] *= work.chunks_per_sequence
        if self.moments < n_layers:
            found["products"] = max(found["products"], *(work.item_bytes(name) for name, _ in work.moments))
        return found

    @cached_property
    def least_slots(self) -> dict[str, int]:
        n_layers, found = self.work.config.n_layers, dict(LEAST_SLOTS[self.order])
        for ring, n in (*self.more_slots, ("input", self.chunks)):
            found[ring] += n
        found["weights"] = min(found["weights"] + self.input_every - 1, n_layers - self.weights)
        found["gradients"] = min(found["gradients"], n_layers - self.gradients)
        if self.moments < n_layers:
            found["products"] = max(found["products"], len(self.work.moments))
        if not self.work.is_long:
            del found["context"]
        return found

    @cached_property
    def _fixed_rings(self) -> int:
        work = self.work
        resident = (self.weights + self.gradients) * work.layer_bytes + self.moments * self.moment_bytes
        sums = work.item_bytes("dcontext") * work.chunks_per_sequence if work.is_long else 0
        return resident + sums + self.chunks * work.item_bytes("dy")

    @cached_property
    def least_ring_bytes(self) -> int:
        """Of all rings at their smallest."""
        return self._fixed_rings + sum(n * self.slot_bytes[ring] for ring, n in self.least_slots.items())

    def kept_counts(self, levels: Levels) -> dict[str, int]:
        """Slots' worth of each part that forward leaves in a round."""
        sequences = self.pairs // self.work.chunks_per_sequence
        context = {"context": sequences} if self.work.is_long and self.keep_context else {}
        inputs = math.ceil(self.work.config.n_layers / self.input_every) * self.chunks
        return {"input": inputs, **context, "attention": levels.attention, "products": levels.products}

    def _kept_bytes(self, levels: Levels) -> int:
        return sum(n * self.slot_bytes[ring] for ring, n in self.kept_counts(levels).items())

    def _in_flight_bytes(self, levels: Levels) -> int:
        """On the host beyond what is kept there."""
        places = IN_FLIGHT if self.order == "interleaved" else 0
        return places * sum(self.slot_bytes[ring] for ring, n in self.kept_counts(levels).items() if n)

    def least_bytes(self, levels: Levels) -> int:
        """Of the device, with all rings at their smallest: what has no slot lies on the host, and needs page tables."""
        on_host = self.host_state_bytes + self._kept_bytes(levels) + self._in_flight_bytes(levels)
        return self.least_ring_bytes + math.ceil(self.table_share * on_host)

    def share_on_device(self, levels: Levels, ring_bytes: int) -> float:
        """Of what forward leaves, how much has a slot until backward; what has one needs no page tables."""
        kept = self._kept_bytes(levels)
        if ring_bytes - self.least_ring_bytes - self.table_share * self.host_state_bytes >= kept:
            return 1.0
        left = ring_bytes - self.least_bytes(levels)
        return max(0.0, min(1.0, left / (kept * (1 - self.table_share))))

    def slots(self, levels: Levels, ring_bytes: int) -> dict[str, int]:
        """Of the rings that layers share."""
        share = self.share_on_device(levels, ring_bytes)
        counts = self.kept_counts(levels)
        return {ring: n + int(share * counts.get(ring, 0)) for ring, n in self.least_slots.items()}

    @cached_property
    def restores(self) -> int:
        """Of a chunk in one round."""
        n_layers = self.work.config.n_layers
        return sum(layer - restored_from(layer, n_layers, self.input_every, self.order) for layer in range(n_layers))

    # the host

    @cached_property
    def _updated_bytes(self) -> int:
        """Weights and moments that stream."""
        n_layers = self.work.config.n_layers
        return (n_layers - self.weights) * self.work.layer_bytes + (n_layers - self.moments) * self.moment_bytes

    @cached_property
    def host_state_bytes(self) -> int:
        return self._updated_bytes + (self.work.config.n_layers - self.gradients) * self.work.layer_bytes

    def host_bytes(self, levels: Levels, ring_bytes: int) -> int:
        share = self.share_on_device(levels, ring_bytes)
        if share == 1:
            return self.host_state_bytes
        kept = sum(int((1 - share) * n) * self.slot_bytes[ring] for ring, n in self.kept_counts(levels).items())
        return self.host_state_bytes + kept + self._in_flight_bytes(levels)

    # seconds

    def _evicted(self, levels: Levels, ring_bytes: int) -> float:
        """Bytes that a round sends to the host and has back, of what forward leaves."""
        work, sequence = self.work, self.work.chunks_per_sequence
        counts = self.kept_counts(levels)
        kept = sum(n * work.item_bytes(ring) * (sequence if ring == "context" else 1) for ring, n in counts.items())
        return (1 - self.share_on_device(levels, ring_bytes)) * kept

    def round_seconds(self, levels: Levels, ring_bytes: int, *, alone: bool) -> float:
        """Of a round by itself, or of one's backward with the next one's forward."""
        seconds, n_layers, layer = self.seconds, self.work.config.n_layers, self.work.layer_bytes
        n_input, n_attention = self.pairs - levels.attention, levels.attention - levels.products
        forward, ends = self.chunks * seconds.forward, self.chunks * seconds.ends
        keys = self.pairs * seconds.keys if self.work.is_long and not self.keep_context else 0.0
        again = keys + self.chunks * self.restores * seconds.restore
        again += n_input * seconds.again_input + n_attention * seconds.again_attention
        backward = self.chunks * seconds.backward + again
        weights, gradients = (n_layers - self.weights) * layer, (n_layers - self.gradients) * layer
        kept, link = self._evicted(levels, ring_bytes), seconds.rates.link_seconds
        if alone:
            back = _together(backward, link(weights + kept + gradients, gradients))
            return _together(forward, link(weights, kept)) + ends + back
        return _together(forward + backward, link(2 * weights + kept + gradients, kept + gradients)) + ends

    @cached_property
    def optimizer_seconds(self) -> float:
        """Of the step's end, if it waits for that of backward."""
        link = self.seconds.rates.link_seconds(self.host_state_bytes, self._updated_bytes)
        return max(link, self.seconds.optimizer)


@dataclass(frozen=True)
class LevelsByHost:
    """Of a layout, by how many bytes of the host its levels need: the fastest ones of those that need at most as many,
    and their seconds, for a round by itself and (``together``) for one beside the next.
    """

    layout: Layout
    ring_bytes: int
    host_bytes: list[int]
    """Ascending; at each place of the other two lists."""
    alone: list[tuple[float, Levels]]
    together: list[tuple[float, Levels]]

    @classmethod
    def of(cls, layout: Layout, ring_bytes: int) -> "LevelsByHost":
        fitting = (one for one in level_steps(*layout.level_bounds) if layout.least_bytes(one) <= ring_bytes)
        sized = sorted(((layout.host_bytes(one, ring_bytes), one) for one in fitting), key=itemgetter(0))

        def faster(a: tuple[float, Levels], b: tuple[float, Levels]) -> tuple[float, Levels]:
            return min(a, b, key=itemgetter(0))

        def fastest(*, alone: bool) -> list[tuple[float, Levels]]:
            found = [(layout.round_seconds(levels, ring_bytes, alone=alone), levels) for _, levels in sized]
            return list(accumulate(found, faster))

        together = fastest(alone=False) if layout.order == "interleaved" else []
        return cls(layout, ring_bytes, [n_bytes for n_bytes, _ in sized], fastest(alone=True), together)


def _together(compute: float, link: float) -> float:
    """Of two that run beside each other and wait for each other here and there: a little more than the longer one."""
    return (compute**SHARPNESS + link**SHARPNESS) ** (1 / SHARPNESS)


@dataclass(frozen=True)
class WorkSeconds:
    """Of one chunk, on average over a sequence."""

    rates: Rates
    forward: float
    """Through all layers, as the next one."""
    backward: float
    again_input: float
    """Through one layer, if its level is that one; likewise the next."""
    again_attention: float
    keys: float
    restore: float
    """Through one layer."""
    ends: float
    """Embedding, head, loss and their backward."""
    optimizer: float
    """Of a step."""

    @classmethod
    def of(cls, work: StreamedWork, rates: Rates) -> "WorkSeconds":
        """Computed once for all layouts."""

        def mean(kind: str, level: str = "") -> float:
            chunks = range(work.chunks_per_sequence)
            return sum(work.seconds(kind, chunk, level, rates) for chunk in chunks) / len(chunks)

        n_layers = work.config.n_layers
        return cls(
            rates,
            n_layers * mean("forward"),
            n_layers * mean("backward"),
            mean("recompute", "input"),
            mean("recompute", "attention"),
            mean("keys"),
            mean("restore"),
            sum(map(mean, ("embed", "head", "embed backward"))),
            n_layers * mean("optimizer") + mean("fixed optimizer"),
        )
