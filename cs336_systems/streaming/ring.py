"""Chooses the plans of a ring: ranks that hold layers round-robin, each under memory caps of its own.

choices = choose_ring(config, 8192, [Caps(24 * GIB, 75 * GIB)] * 2, Rates.of(hardware))    # a plan for each rank
min(choice.tokens_per_s for choice in choices)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import MOMENTS, Share, StreamedWork
from cs336_systems.streaming.build import build, ring_times
from cs336_systems.streaming.choose import (
    EFFORT,
    LEAST_CHUNK,
    SIMULATED_ROUNDS,
    Caps,
    CapsTooSmallError,
    ChosenPlan,
    Search,
    choose,
    chunk_sizes,
)
from cs336_systems.streaming.estimate import WorkSeconds
from cs336_systems.streaming.plan import ORDERS, Keep, Order, Plan
from cs336_systems.streaming.schedule import Schedule

RING_CUTS = 4
"""The most ways to cut a step into chunks, by order and number of chunks, for which the whole ring is simulated."""
EFFORT_SHARE = 4
"""A search for cuts takes a quarter of the effort, and one for the plan of a rank by itself a quarter of that."""
DEAL_GAIN = 0.01
"""The relative gain for which more layers are dealt to one rank, or forward leads by more, as copies make the rest."""
LEADS = range(4)
"""Leads of forward that are tried: with 2 ranks of an 8B model one layer is best, with 4 ranks three."""


class Cut(NamedTuple):
    """How a step is cut into chunks; None leaves a choice to the search."""

    tokens_per_step: int | None = None
    chunk: int | None = None
    chunks: int | None = None
    """Chunks of a round."""


class Deal(NamedTuple):
    """How layers are dealt to ranks, and the order in which these visit them."""

    order: Order
    first: int = 0
    """``first`` of ``Share.dealt``."""
    lead: int = 0


def choose_ring(
    config: ModelConfig,
    context_length: int,
    caps: Sequence[Caps],
    rates: Rates,
    *,
    tokens_per_step: int | None = None,
    chunk: int | None = None,
    chunks: int | None = None,
    effort: int = EFFORT,
    **others: Any,
) -> list[ChosenPlan]:
    """The fastest plan of each rank, with its share of the layers and its own caps.

    For each order of rounds layers are dealt as is fastest if nothing is copied, and if that does not fit, evenly. A
    search for the rank with most to compute finds the fastest ways to cut a step into chunks. The other ranks are
    planned for the best of these, each by itself as if all others copied all the time, and the ring is simulated as a
    whole; so it is for the small steps that follow from the best plans, one rank after the other. A round has at least
    as many chunks as there are ranks, so that all can compute at the same time.

    Args:
        caps: of each rank.
        others: further arguments of ``choose``.

    Raises:
        CapsTooSmallError: nothing fits on one of the ranks, or a step has fewer chunks than there are ranks.
        ValueError: as ``choose``; or there are fewer layers than ranks.
    """
    n_ranks, given = len(caps), Cut(tokens_per_step, chunk, chunks)
    if n_ranks == 1:
        return [choose(config, context_length, caps[0], rates, effort=effort, **given._asdict(), **others)]
    precision, moments = others.pop("precision", PRECISIONS["bf16"]), others.pop("moments", MOMENTS)
    clipping, least = others.pop("clipping", True), others.pop("least_chunk", LEAST_CHUNK)
    of_blocks = {"recipe": others.pop("recipe", STORED), "lora": others.pop("lora", None), "quantized_at_use": True}
    beside = replace(rates, others=n_ranks - 1)

    def works(rank: int, deal: Deal, cut: Cut) -> list[StreamedWork]:
        sizes = [cut.chunk] if cut.chunk else chunk_sizes(context_length, least)
        how: dict[str, Any] = of_blocks | {"share": Share.dealt(config, rank, n_ranks, deal.first)}
        return [StreamedWork(config, context_length, n, precision, tuple(moments.items()), **how) for n in sizes]

    def search(rank: int, deal: Deal, cut: Cut) -> Search:
        of = works(rank, deal, cut), caps[rank], beside, cut.tokens_per_step, cut.chunks, clipping
        return Search(*of, (deal.order,), deal.lead)

    def cuts(deal: Deal) -> list[tuple[float, Deal, Cut]]:
        """The best ways to cut a step for the rank with most to compute, each with its tokens per second."""
        leader = max(range(n_ranks), key=lambda rank: WorkSeconds.of(works(rank, deal, given)[0], rates).of_chunk)
        first = search(leader, deal, given)
        first.best(effort // EFFORT_SHARE)
        best: dict[Cut, float] = {}
        for plan in first.ranking():
            best.setdefault(Cut(plan.tokens, plan.work.chunk, plan.chunks), first.rate(plan))
        return [(rate, deal, cut) for cut, rate in best.items()]

    def planned(deal: Deal, cut: Cut) -> list[ChosenPlan]:
        found = [search(rank, deal, cut).best(effort // EFFORT_SHARE**2) for rank in range(n_ranks)]
        return _simulated(found, rates)

    def climbed(choices: list[ChosenPlan]) -> list[ChosenPlan]:
        """Small steps of one rank's plan after the other's."""
        for rank in range(n_ranks):
            others = [None if other == rank else each.plan for other, each in enumerate(choices)]
            within = _SearchInRing([], caps[rank], rates, None, None, clipping, others=others)
            choices = [*choices[:rank], within.climb(choices[rank], effort), *choices[rank + 1 :]]
        return _simulated(choices, rates)

    found: list[list[ChosenPlan]] = []
    short: CapsTooSmallError | None = None
    deals = [_fastest_deal(lambda rank, deal: works(rank, deal, given)[0], n_ranks, order, rates) for order in ORDERS]
    for these in (deals, [deal for deal in map(Deal, ORDERS) if deal not in deals]):
        if found:
            break
        ways: list[tuple[float, Deal, Cut]] = []
        for deal in these:
            try:
                ways += cuts(deal)
            except CapsTooSmallError as error:
                short = error
        for _, deal, cut in sorted(ways, key=itemgetter(0), reverse=True)[:RING_CUTS]:
            try:
                found.append(planned(deal, cut))
            except CapsTooSmallError as error:
                short = error
    if not found:
        assert short is not None
        raise short
    best = max(found, key=_tokens_per_s)
    return max(best, climbed(best), key=_tokens_per_s)


def _simulated(choices: Sequence[ChosenPlan], rates: Rates) -> list[ChosenPlan]:
    """The same plans with the times of the ring as a whole."""
    times = ring_times([each.plan for each in choices], [each.schedule for each in choices], rates)
    return [replace(each, times=own) for each, own in zip(choices, times, strict=True)]


def _tokens_per_s(choices: Sequence[ChosenPlan]) -> float:
    return min(each.tokens_per_s for each in choices)


@dataclass
class _SearchInRing(Search):
    """A search for one rank's plan beside those of the others, for each of which the ring is simulated as a whole."""

    others: Sequence[Plan | None] = ()
    """The plans of all ranks, None for the one that is searched."""

    def climb(self, choice: ChosenPlan, effort: int) -> ChosenPlan:
        """A plan that is no slower, by small steps from one that fits, with the times of the latter."""
        self._climb(choice.plan, effort)
        plans = (replace(choice, plan=plan, schedule=build(plan)) for plan in self.ranking())
        return next((each for each in plans if each.fits), choice)

    def _choice(self, plan: Plan) -> ChosenPlan:
        of_all = [replace(other, rounds=plan.rounds) if other else plan for other in self.others]
        schedules = [
            self._build(each) if other else build(each) for each, other in zip(of_all, self.others, strict=True)
        ]
        rank = self.others.index(None)
        self.operations += sum(len(each.operations) for i, each in enumerate(schedules) if i != rank)
        return ChosenPlan(plan, schedules[rank], ring_times(of_all, schedules, self.rates)[rank], self.caps)

    @cached_property
    def _build(self) -> Callable[[Plan], Schedule]:
        """``build`` of the others' plans, which are the same for every plan of this rank."""
        return cache(build)


def _fastest_deal(work: Callable[[int, Deal], StreamedWork], n_ranks: int, order: Order, rates: Rates) -> Deal:
    """The deal with which ranks end first if everything has a slot.

    Args:
        work: that of a rank in a deal.
    """
    even, best, least = work(0, Deal(order)), Deal(order), math.inf
    depth, group = even.config.n_layers, even.chunks_per_sequence
    chunks = group * math.ceil(n_ranks / group)
    of_layer = sum(even.seconds(kind, 0, "products", rates) for kind in ("forward", "backward"))
    most = 1 + math.ceil(even.seconds("head", 0, "", rates) / of_layer) if not even.has_head else 0

    def resident(of: StreamedWork, lead: int) -> Plan:
        n, pairs = len(of.layers), chunks * len(of.layers)
        states: dict[str, Any] = dict.fromkeys(of.states, n)
        return Plan(of, chunks, SIMULATED_ROUNDS, order, Keep(pairs, pairs), lead=lead, **states)

    leads = LEADS[:depth] if order == "interleaved" else range(1)
    for first, lead in product(range(min(most, depth - n_ranks) + 1), leads):
        deal = Deal(order, first, lead)
        plans = [resident(work(rank, deal), lead) for rank in range(n_ranks)]
        span = max(each.span for each in ring_times(plans, [build(plan) for plan in plans], rates))
        if span < least * (1 - DEAL_GAIN):
            best, least = deal, span
    return best
