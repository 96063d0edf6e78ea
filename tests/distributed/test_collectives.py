"""Each collective gives the right result on gloo, in every dtype and at odd sizes; and a wrong one is noticed."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from cs336_systems.costs.communication import COLLECTIVES
from cs336_systems.distributed.collectives import Exchange
from cs336_systems.distributed.process_group import Rank

from .checks import on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTS_PER_RANK = (1, 13, 1009)


def exchange_all(rank: Rank):
    """For each exchange: wrong elements before, after a run, with one element damaged and with two parts swapped."""
    found = {}
    for collective in COLLECTIVES:
        for dtype in DTYPES:
            for elements in ELEMENTS_PER_RANK:
                exchange = Exchange(collective, elements * rank.world_size, dtype, rank)
                assert exchange.total_bytes == elements * rank.world_size * dtype.itemsize
                exchange.reset()
                before = exchange.wrong_elements()
                with CommDebugMode() as counted:
                    exchange.run()
                assert counted.get_total_counts() == 1
                after = exchange.wrong_elements()
                exchange.received[-1] += 1
                damaged = exchange.wrong_elements()
                exchange.received[-1] = torch.nan
                assert exchange.wrong_elements() == damaged
                exchange.reset()
                exchange.run()
                exchange.received.copy_(exchange.received.roll(1))
                found[collective, dtype, elements] = before, after, damaged, exchange.wrong_elements()
    return found


@pytest.fixture(scope="module", params=(2, 3))
def found(request):
    return on_ranks(exchange_all, request.param)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective_gives_the_right_elements_and_notices_wrong_ones(found, collective):
    for rank, by_rank in enumerate(found):
        for dtype in DTYPES:
            for elements in ELEMENTS_PER_RANK:
                before, after, damaged, rolled = by_rank[collective, dtype, elements]
                assert after == 0
                assert damaged == 1
                assert rolled > 0 or elements == 1
                if not (collective == "broadcast" and rank == 0):
                    assert before > 0


def test_exchange_refuses_what_it_cannot_do():
    rank = Rank(0, 0, 2, torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match="number of elements 3 cannot be divided evenly over 2 ranks"):
        Exchange("all_reduce", 3, torch.float32, rank)
    with pytest.raises(ValueError, match="unknown collective 'reduce'"):
        Exchange("reduce", 2, torch.float32, rank)
    with pytest.raises(ValueError, match="torch.bfloat16 cannot hold sums over 22 ranks exactly"):
        Exchange("all_reduce", 22, torch.bfloat16, Rank(0, 0, 22, torch.device("cpu"), "gloo"))
