"""Chooses the plans of a ring: ranks to which layers are dealt in turn, each under memory caps of its own.

choices = choose_ring(config, 8192, [Caps(24 * GIB, 75 * GIB)] * 2, Rates.of(hardware))    # a plan for each rank
min(choice.tokens_per_s for choice in choices)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import MOMENTS, Share, StreamedWork
from cs336_systems.streaming.build import ring_times
from cs336_systems.streaming.choose import (
    EFFORT,
    LEAST_CHUNK,
    Caps,
    CapsTooSmallError,
    ChosenPlan,
    Search,
    choose,
    chunk_sizes,
)
from cs336_systems.streaming.estimate import WorkSeconds
from cs336_systems.streaming.plan import ORDERS, Order

RING_CUTS = 4
"""The most ways to cut a step into chunks, by order and number of chunks, for which the whole ring is simulated."""


class Cut(NamedTuple):
    """How a step is cut into chunks, and the order of its rounds; None leaves a choice to the search."""

    tokens: int | None = None
    """Tokens of a step; ``chunk`` is tokens of a chunk, ``chunks`` the number in a round."""
    chunk: int | None = None
    chunks: int | None = None
    order: Order | None = None


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

    A search for the rank with most to compute finds the fastest ways to cut a step into chunks. The other ranks are
    planned for the best of these, and the ring is simulated as a whole. A rank by itself is simulated as if all others
    copied all the time. A round has at least as many chunks as there are ranks, so that all can compute at the same
    time.

    Args:
        caps: of each rank.
        others: further arguments of ``choose``.

    Raises:
        CapsTooSmallError: nothing fits on one of the ranks, or a step has fewer chunks than there are ranks.
        ValueError: as ``choose``; or there are fewer layers than ranks.
    """
    n_ranks = len(caps)
    if n_ranks == 1:
        how: dict[str, Any] = {"tokens_per_step": tokens_per_step, "chunk": chunk, "chunks": chunks}
        return [choose(config, context_length, caps[0], rates, effort=effort, **how, **others)]
    precision, moments = others.pop("precision", PRECISIONS["bf16"]), others.pop("moments", MOMENTS)
    clipping, least = others.pop("clipping", True), others.pop("least_chunk", LEAST_CHUNK)
    lora, beside = others.pop("lora", None), replace(rates, others=n_ranks - 1)

    def search(rank: int, cut: Cut) -> Search:
        sizes = [cut.chunk] if cut.chunk else chunk_sizes(context_length, least)
        share = Share.dealt(config, rank, n_ranks)
        how: dict[str, Any] = {"share": share, "lora": lora}
        works = [StreamedWork(config, context_length, n, precision, tuple(moments.items()), **how) for n in sizes]
        orders = (cut.order,) if cut.order else ORDERS
        return Search(works, caps[rank], beside, cut.tokens, cut.chunks, clipping, orders)

    def busy(rank: int) -> float:
        return WorkSeconds.of(search(rank, Cut()).works[0], rates).of_chunk

    leader = max(range(n_ranks), key=busy)
    first = search(leader, Cut(tokens_per_step, chunk, chunks))
    first.best(effort)
    ways: dict[tuple[Order, int], Cut] = {}
    for plan in first.ranking():
        ways.setdefault((plan.order, plan.chunks), Cut(plan.tokens, plan.work.chunk, plan.chunks, plan.order))
    found, short = [], None
    for cut in list(ways.values())[:RING_CUTS]:
        try:
            choices = [search(rank, cut).best(effort // (2 * RING_CUTS)) for rank in range(n_ranks)]
        except CapsTooSmallError as error:
            short = short or error
            continue
        times = ring_times([each.plan for each in choices], [each.schedule for each in choices], rates)
        found.append([replace(each, times=own) for each, own in zip(choices, times, strict=True)])
    if not found:
        assert short is not None
        raise short
    return max(found, key=lambda choices: min(each.tokens_per_s for each in choices))
