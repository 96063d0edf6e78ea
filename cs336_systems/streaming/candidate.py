"""A plan as the search of ``choose.py`` holds it, before a schedule is built, and the small steps to its neighbours."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import product

from cs336_systems.streaming.estimate import Layout, Levels
from cs336_systems.streaming.plan import Plan, spread_levels


@dataclass(frozen=True)
class Candidate:
    """A layout with its levels and rounds, and what they should reach."""

    layout: Layout
    levels: Levels
    edges: Levels
    rounds: int
    ring_bytes: int
    tokens_per_s: float = field(compare=False)
    """Estimated."""

    def plan(self, clipping: bool) -> Plan:
        layout, n_layers = self.layout, self.layout.work.config.n_layers

        def spread(levels: Levels) -> tuple[tuple[str, ...], ...]:
            attention = levels.attention - levels.products
            return spread_levels(n_layers, layout.chunks, levels.products, attention, layout.input_every)

        largest = Levels(*(max(pair) for pair in zip(astuple(self.levels), astuple(self.edges), strict=True)))
        return Plan(
            layout.work,
            layout.chunks,
            self.rounds,
            layout.order,
            spread(self.levels),
            tuple(layout.slots(largest, self.ring_bytes).items()),
            (("weights", layout.weights), ("gradients", layout.gradients), ("moments", layout.moments)),
            spread(self.edges) if self.edges != self.levels else None,
            layout.keep_context,
            layout.input_every,
            clipping,
        )


def steps(layout: Layout, parts: int) -> Iterator[Callable[[Candidate], Candidate | None]]:
    """To neighbours of a candidate: levels and residents by a part of them, one for the other in about as much of the
    device's memory, slots one by one; None beyond the ends.
    """
    pairs, n_layers = max(1, layout.pairs // parts), max(1, layout.work.config.n_layers // parts)
    edges = (False, True) if layout.order == "interleaved" else (None,)
    for edge, (attention, products), sign in product(edges, ((1, 0), (0, 1), (1, 1)), (1, -1)):
        yield partial(_with_levels, edge=edge, attention=sign * attention * pairs, products=sign * products * pairs)
    for what, sign in product(("weights", "gradients", "moments"), (1, -1)):
        yield partial(_with_residents, what=what, more=sign * n_layers)
    for sign in (1, -1):
        yield partial(_with_residents_for_products, more=sign * n_layers)
    for ring in layout.least_slots:
        yield partial(_with_slots, ring=ring)


def _with_levels(candidate: Candidate, edge: bool | None, attention: int, products: int) -> Candidate | None:
    """Of edge rounds, of the others, or (None) of all."""
    levels = candidate.edges if edge else candidate.levels
    least, most = candidate.layout.level_bounds
    n_products = max(least.products, min(most.products, levels.products + products))
    n_attention = max(least.attention, min(most.attention, levels.attention + attention))
    after = Levels(max(n_products, n_attention), n_products)
    if after == levels:
        return None
    return replace(
        candidate, edges=candidate.edges if edge is False else after, levels=candidate.levels if edge else after
    )


def _with_residents(candidate: Candidate, what: str, more: int) -> Candidate | None:
    now = getattr(candidate.layout, what)
    after = max(0, min(candidate.layout.work.config.n_layers, now + more))
    return None if after == now else replace(candidate, layout=replace(candidate.layout, **{what: after}))


def _with_residents_for_products(candidate: Candidate, more: int) -> Candidate | None:
    """More resident weights where pairs kept products, or fewer for more of those, in all rounds."""
    layout, after = candidate.layout, _with_residents(candidate, "weights", more)
    if after is None:
        return None
    taken = (after.layout.weights - layout.weights) * layout.work.layer_bytes
    pairs = round(taken / layout.slot_bytes["products"])
    for edge in (False, True):
        after = _with_levels(after, edge, 0, -pairs) or after
    return after


def _with_slots(candidate: Candidate, ring: str) -> Candidate | None:
    """One more of a ring."""
    more = dict(candidate.layout.more_slots)
    if more.get(ring, 0) == 3:
        return None
    more[ring] = more.get(ring, 0) + 1
    return replace(candidate, layout=replace(candidate.layout, more_slots=tuple(sorted(more.items()))))
