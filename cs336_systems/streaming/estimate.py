"""Estimates a plan's step time without a schedule, by sums over one round, and defines the neighbours of a plan.

A phase takes the time of its slowest lane. Phases are forward and backward if rounds are sequential, and both together
if they are interleaved, except for the beginning of the first round and the end of the last. Kept activations are added
in the order of their value per byte: attention's output of all pairs of layer and chunk, then products.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter

from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.streaming.plan import Keep, Plan

SHARPNESS = 8
"""Exponent that smooths the transition between compute-bound and link-bound steps: if both take the same time, the
estimate is 9 % longer than either, as simulated steps are."""


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
            last = work.chunks_per_sequence - 1  # each chunk has as many keys more as the one before
            return sum(work.seconds(kind, chunk, level, rates) for chunk in (0, last)) / 2

        n_layers = len(work.layers)
        embedding = ("embed",) if work.lora else ("embed", "embed backward")
        return cls(
            rates,
            n_layers * mean("forward"),
            n_layers * mean("backward"),
            mean("recompute", "input"),
            mean("recompute", "attention"),
            mean("keys"),
            mean("restore"),
            sum(map(mean, embedding * work.has_embedding + ("head",) * work.has_head)),
            n_layers * mean("optimizer") + mean("fixed optimizer"),
        )

    @property
    def of_chunk(self) -> float:
        """Seconds of all kernels of one chunk, if nothing is recomputed."""
        return self.forward + self.backward + self.ends

    def of_round(self, plan: Plan, keep: Keep, *, alone: bool) -> float:
        """Seconds of one round, or of a round's backward together with the next round's forward."""
        layer, link = plan.work.layer_bytes, self.rates.link_seconds
        n_input, n_attention = plan.pairs - keep.attention, keep.attention - keep.products
        forward, ends = plan.chunks * self.forward, plan.chunks * self.ends
        keys = plan.pairs * self.keys if plan.work.is_long and not plan.keep_context else 0.0
        recomputed = keys + plan.chunks * plan.restores * self.restore
        recomputed += n_input * self.recompute_input + n_attention * self.recompute_attention
        backward = plan.chunks * self.backward + recomputed
        weights = (plan.n_layers - plan.weights) * layer
        gradients = (plan.n_layers - plan.gradients) * plan.work.item_bytes("gradients")
        kept = plan.evicted_bytes(keep)
        if alone:
            back = _together(backward, link(weights + kept + gradients, gradients))
            return _together(forward, link(weights, kept)) + ends + back
        return _together(forward + backward, link(2 * weights + kept + gradients, kept + gradients)) + ends

    def of_optimizer(self, plan: Plan) -> float:
        """Seconds from backward to the end of the step, if the optimizer waits for the end of backward."""
        if plan.work.lora:  # whose adapters are on the device
            return self.optimizer
        return max(self.rates.link_seconds(plan.host_state_bytes, plan.updated_bytes), self.optimizer)


def _together(compute: float, link: float) -> float:
    """Seconds of two lanes that sometimes wait for each other: a little more than the longer one's."""
    return (compute**SHARPNESS + link**SHARPNESS) ** (1 / SHARPNESS)


def best_keep(plan: Plan, seconds: WorkSeconds, host_bytes: int) -> tuple[float, Keep] | None:
    """The least seconds of a round within the plan's ``ring_bytes`` and ``host_bytes``, and the activations then kept.

    For interleaved rounds, the seconds of a backward together with the next forward. None if nothing fits.
    """
    assert plan.ring_bytes is not None
    alone = plan.order == "sequential"
    within = [
        (seconds.of_round(plan, keep, alone=alone), keep)
        for keep in _keep_steps(*plan.keep_bounds)
        if plan.least_bytes(keep) <= plan.ring_bytes and plan.host_bytes(keep) <= host_bytes
    ]
    return min(within, key=itemgetter(0), default=None)


def _keep_steps(least: Keep, most: Keep) -> list[Keep]:
    """The ``keep`` of plans that are tried: sixteen steps from input to attention, and sixteen more to products."""
    attention, products = (
        sorted({low + (high - low) * i // 16 for i in range(17)}) for low, high in zip(least, most, strict=True)
    )
    return [Keep(n, least.products) for n in attention] + [Keep(most.attention, n) for n in products[1:]]


def neighbours(plan: Plan, parts: int) -> Iterator[Callable[[Plan], Plan | None]]:
    """Functions from a plan to a neighbour, or to None beyond the ends.

    They change the kept activations or the number of resident layers by one part in ``parts``, and exchange resident
    weights for kept products in about the same device memory.
    """
    pairs, n_layers = max(1, plan.pairs // parts), max(1, plan.n_layers // parts)
    for (attention, products), sign in product(((1, 0), (0, 1), (1, 1)), (1, -1)):
        yield partial(_with_keep, attention=sign * attention * pairs, products=sign * products * pairs)
    for what, sign in product(plan.work.states, (1, -1)):
        yield partial(_with_residents, what=what, more=sign * n_layers)
    for sign in (1, -1):
        yield partial(with_residents_for_products, more=sign * n_layers)


def _with_keep(plan: Plan, attention: int, products: int) -> Plan | None:
    least, most = plan.keep_bounds
    n_products = max(least.products, min(most.products, plan.keep.products + products))
    n_attention = max(least.attention, min(most.attention, plan.keep.attention + attention))
    after = Keep(max(n_products, n_attention), n_products)
    return None if after == plan.keep else replace(plan, keep=after)


def _with_residents(plan: Plan, what: str, more: int) -> Plan | None:
    now = getattr(plan, what)
    after = max(0, min(plan.n_layers, now + more))
    return None if after == now else replace(plan, **{what: after})


def with_residents_for_products(plan: Plan, more: int) -> Plan | None:
    """Keep more layers' weights resident and fewer products, or the reverse, in about the same memory."""
    after = _with_residents(plan, "weights", more)
    if after is None:
        return None
    taken = (after.weights - plan.weights) * plan.work.layer_bytes
    return _with_keep(after, 0, -round(taken / plan.slot_bytes["products"])) or after
