"""Each collective gives the right result on gloo, in every dtype and at odd sizes; and a wrong one is noticed."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from cs336_systems.costs.communication import COLLECTIVES
from cs336_systems.distributed.collectives import Exchange
from cs336_systems.distributed.process_group import Rank

from .checks import on_ranks


def check_exchange(rank: Rank, collective, dtype, elements):
    """Nothing is right before a run, all after it; one damaged element is one, NaN too, and shifted ones are some."""
    exchange = Exchange(collective, elements * rank.world_size, dtype, rank)
    assert exchange.total_bytes == elements * rank.world_size * dtype.itemsize
    exchange.reset()
    assert exchange.wrong_elements() > 0 or (collective == "broadcast" and rank.rank == 0)
    with CommDebugMode() as counted:
        exchange.run()
    assert counted.get_total_counts() == 1
    assert exchange.wrong_elements() == 0
    right = exchange.received[-1].clone()
    for damage in (right + 1, torch.nan):
        exchange.received[-1] = damage
        assert exchange.wrong_elements() == 1
    exchange.received[-1] = right
    exchange.received.copy_(exchange.received.roll(1))
    assert exchange.wrong_elements() > 0 or elements == 1


def check_exchanges(rank: Rank):
    for collective in COLLECTIVES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for elements in (1, 13, 1009):
                check_exchange(rank, collective, dtype, elements)


@pytest.mark.slow
def test_collectives_give_the_right_elements_and_wrong_ones_are_noticed():
    on_ranks(check_exchanges, 4)


def test_exchange_refuses_what_it_cannot_do():
    for arguments, world_size, message in (
        (("all_reduce", 3, torch.float32), 2, "number of elements 3 .* 2 ranks"),
        (("reduce", 2, torch.float32), 2, "'reduce'"),
        (("all_reduce", 22, torch.bfloat16), 22, "torch.bfloat16 .* 22 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            Exchange(*arguments, Rank(0, 0, world_size, torch.device("cpu"), "gloo"))
