"""How long a plan's step takes, before any schedule is built: sums over one round, and the small steps between plans.

Time is that of the slowest lane in each phase: forward and backward where rounds are sequential, both together where
they are interleaved, but for the beginning of the first and the end of the last one. What is kept is raised in one
order, best bytes first: attention's output of all pairs of layer and chunk, then products.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter

from cs336_systems.costs.streaming import Rates, StreamedWork
from cs336_systems.streaming.plan import Keep, Plan

SHARPNESS = 8
"""Exponent of the corner between a step that kernels bound and one that the link bounds: where both take the same time
the estimate is 9 % longer than either, as simulated steps are."""
MOST_MORE_SLOTS = 3
"""Slots that a ring may have beyond the least; more have brought nothing."""


@dataclass(frozen=True)
class WorkSeconds:
    """Seconds of one chunk, on average over the chunks of a sequence."""

    rates: Rates
    forward: float
    """Forward through all layers."""
    backward: float
    """Backward through all layers."""
    recompute_input: float
    """Recomputation in one layer that keeps ``input``."""
    recompute_attention: float
    """Recomputation in one layer that keeps ``attention``."""
    keys: float
    """Recomputation of k and v in one layer."""
    restore: float
    """Restoring x through one layer."""
    ends: float
    """Embedding, head, loss and their backward."""
    optimizer: float
    """The optimizer's kernels in a whole step."""

    @classmethod
    def of(cls, work: StreamedWork, rates: Rates) -> "WorkSeconds":
        """The sums that all plans of this work share."""

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

    def of_round(self, plan: Plan, keep: Keep, *, alone: bool) -> float:
        """Seconds of a round by itself, or of one's backward with the next one's forward."""
        layer, link = plan.work.layer_bytes, self.rates.link_seconds
        n_input, n_attention = plan.pairs - keep.attention, keep.attention - keep.products
        forward, ends = plan.chunks * self.forward, plan.chunks * self.ends
        keys = plan.pairs * self.keys if plan.work.is_long and not plan.keep_context else 0.0
        recomputed = keys + plan.chunks * plan.restores * self.restore
        recomputed += n_input * self.recompute_input + n_attention * self.recompute_attention
        backward = plan.chunks * self.backward + recomputed
        weights, gradients = (plan.n_layers - plan.weights) * layer, (plan.n_layers - plan.gradients) * layer
        kept = plan.evicted_bytes(keep)
        if alone:
            back = _together(backward, link(weights + kept + gradients, gradients))
            return _together(forward, link(weights, kept)) + ends + back
        return _together(forward + backward, link(2 * weights + kept + gradients, kept + gradients)) + ends

    def of_optimizer(self, plan: Plan) -> float:
        """Seconds of the step's end, if the optimizer waits for the end of backward."""
        return max(self.rates.link_seconds(plan.host_state_bytes, plan.updated_bytes), self.optimizer)


def _together(compute: float, link: float) -> float:
    """Seconds of two lanes that wait for each other here and there: a little more than the longer one's."""
    return (compute**SHARPNESS + link**SHARPNESS) ** (1 / SHARPNESS)


def best_keeps(plan: Plan, seconds: WorkSeconds, host_bytes: int) -> list[tuple[float, Keep]]:
    """The levels at which such a plan is fastest within its ``ring_bytes`` and so many bytes of the host, and seconds.

    There is one for a round by itself, and of interleaved rounds another beside the next round; none if nothing fits.
    """
    assert plan.ring_bytes is not None
    fitting = [keep for keep in _keep_steps(*plan.keep_bounds) if plan.least_bytes(keep) <= plan.ring_bytes]
    sized = sorted(((plan.host_bytes(keep), keep) for keep in fitting), key=itemgetter(0))
    within = [keep for n_bytes, keep in sized if n_bytes <= host_bytes]
    return [
        min(((seconds.of_round(plan, keep, alone=alone), keep) for keep in within), key=itemgetter(0))
        for alone in ((True, False) if plan.order == "interleaved" else (True,))
        if within
    ]


def _keep_steps(least: Keep, most: Keep) -> list[Keep]:
    """Levels from input to attention, then to products, in sixteen steps each."""
    attention, products = (
        sorted({low + (high - low) * i // 16 for i in range(17)}) for low, high in zip(least, most, strict=True)
    )
    return [Keep(n, least.products) for n in attention] + [Keep(most.attention, n) for n in products[1:]]


def neighbours(plan: Plan, parts: int) -> Iterator[Callable[[Plan], Plan | None]]:
    """Functions from a plan to a neighbour, or to None beyond the ends.

    They change what is kept and how many layers are resident by one of so many parts, exchange resident weights for
    kept products in about as much of the device's memory, and add single slots.
    """
    pairs, n_layers = max(1, plan.pairs // parts), max(1, plan.n_layers // parts)
    edges = (False, True) if plan.order == "interleaved" else (None,)
    for edge, (attention, products), sign in product(edges, ((1, 0), (0, 1), (1, 1)), (1, -1)):
        yield partial(_with_keep, edge=edge, attention=sign * attention * pairs, products=sign * products * pairs)
    for what, sign in product(("weights", "gradients", "moments"), (1, -1)):
        yield partial(_with_residents, what=what, more=sign * n_layers)
    for sign in (1, -1):
        yield partial(with_residents_for_products, more=sign * n_layers)
    for ring in plan.least_slots:
        yield partial(_with_slot, ring=ring)


def _with_keep(plan: Plan, edge: bool | None, attention: int, products: int) -> Plan | None:
    """Changes the first and the last round if ``edge``, the others if not, all if it is None."""
    before = plan.edge_keep or plan.keep
    keep = before if edge else plan.keep
    least, most = plan.keep_bounds
    n_products = max(least.products, min(most.products, keep.products + products))
    n_attention = max(least.attention, min(most.attention, keep.attention + attention))
    after = Keep(max(n_products, n_attention), n_products)
    if after == keep:
        return None
    return replace(plan, edge_keep=before if edge is False else after, keep=plan.keep if edge else after)


def _with_residents(plan: Plan, what: str, more: int) -> Plan | None:
    now = getattr(plan, what)
    after = max(0, min(plan.n_layers, now + more))
    return None if after == now else replace(plan, **{what: after})


def with_residents_for_products(plan: Plan, more: int) -> Plan | None:
    """More resident weights where pairs kept products, or fewer for more of those, in all rounds."""
    after = _with_residents(plan, "weights", more)
    if after is None:
        return None
    taken = (after.weights - plan.weights) * plan.work.layer_bytes
    pairs = round(taken / plan.slot_bytes["products"])
    for edge in (False, True):
        after = _with_keep(after, edge, 0, -pairs) or after
    return after


def _with_slot(plan: Plan, ring: str) -> Plan | None:
    """One more slot of a ring."""
    more = dict(plan.more_slots)
    if more.get(ring, 0) == MOST_MORE_SLOTS:
        return None
    more[ring] = more.get(ring, 0) + 1
    return replace(plan, more_slots=tuple(sorted(more.items())))
