"""Rings played step by step end with the right sums, and send what the closed forms say."""

import pytest

from cs336_systems.costs.communication import Link, cost
from cs336_systems.costs.parallelism.ring import (
    Holdings,
    RingRun,
    all_gather,
    all_reduce,
    alternate_all_reduce,
    reduce_scatter,
)

WORLDS = [1, 3, 8]


def complete(holdings: Holdings) -> bool:
    """Whether every rank holds every rank's chunk, summed over all ranks."""
    ranks = range(len(holdings))
    return all(held.get(chunk) == frozenset(ranks) for held in holdings for chunk in ranks)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_each_rank_holds_at_the_end(world_size):
    scattered = reduce_scatter(world_size, 64 * world_size).holdings[-1]
    assert scattered == tuple({rank: frozenset(range(world_size))} for rank in range(world_size))
    gathered = all_gather(world_size, 64 * world_size).holdings[-1]
    assert gathered == ({chunk: frozenset({chunk}) for chunk in range(world_size)},) * world_size
    reduced = all_reduce(world_size, 64 * world_size)
    assert complete(reduced.holdings[-1])
    assert world_size == 1 or not complete(reduced.holdings[-2])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("collective", "simulate"),
    [("all_gather", all_gather), ("reduce_scatter", reduce_scatter), ("all_reduce", all_reduce)],
)
def test_closed_forms_of_chunked_rings(collective, simulate, world_size):
    total = 96 * world_size
    run: RingRun = simulate(world_size, total)
    closed = cost(collective, world_size, total)
    assert len(run.steps) == closed.steps
    assert run.bytes_per_link == (closed.wire_bytes,) * world_size
    assert run.seconds(450e9, 2e-6) == pytest.approx(Link(2e-6, 1 / 450e9).seconds(closed))


@pytest.mark.parametrize("world_size", WORLDS)
def test_alternate_sends_half_the_ranks_times_more(world_size):
    total = 96 * world_size
    whole, chunked = alternate_all_reduce(world_size, total), all_reduce(world_size, total)
    assert whole.bytes_per_link == ((world_size - 1) * total,) * world_size
    assert whole.seconds(1e9) == pytest.approx(world_size / 2 * chunked.seconds(1e9))
    assert 2 * len(whole.steps) == len(chunked.steps)


def test_bad_input():
    for simulate in (all_gather, reduce_scatter, all_reduce, alternate_all_reduce):
        for arguments in ((0, 8), (2, -1)):
            with pytest.raises(ValueError, match="got (0|-1)"):
                simulate(*arguments)
