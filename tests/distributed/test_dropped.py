"""Without any one of its collectives or messages a step is not that of one process, and the comparison sees it.

Where a rank dies in one, the others end, too.
"""

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336_systems.distributed.process_group import Rank, is_peer_lost
from cs336_systems.ranks import CONTEXT_ORDERS, Parallel
from cs336_systems.training.assemble import assemble, random_batch

from .checks import on_ranks, spawn
from .test_mesh import QWEN2, compare_one, run_of, train_one

WAYS = {
    "tensor": Parallel(tensor=2),
    "copies": Parallel(tensor=2, tensor_by="copies"),
    **{order: Parallel("bucketed", context=2, context_order=order) for order in CONTEXT_ORDERS},
}
CASES = {name: replace(run_of(1, 1, "ddp", QWEN2), how=how) for name, how in WAYS.items()}


class Dropping(TorchDispatchMode):
    """Drops what a rank receives for the n-th time: a sum is left its own addend, anything else is zero.

    The collective still runs, on copies, so that ranks stay together. Flags in uint8, by which ranks agree on what has
    gradients, do not count: here everything has.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.n_seen, self.dropped = number, 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if func.namespace == "c10d" and name != "send" and tree_leaves(args[0])[0].dtype != torch.uint8:
            self.n_seen += 1
            if self.n_seen == self.number:
                self.dropped, received = name, args[0]
                args = tree_map_only(Tensor, torch.clone, args)
                if name != "allreduce_":
                    tree_map_only(Tensor, Tensor.zero_, received)
        return func(*args, **(kwargs or {}))


def train_without_each(rank: Rank, case):
    """The results of a step, then of one without its first collective, without its second and so on, with its name.

    None stands for results where weights that both ranks have whole differ, which both see.
    """
    every = Dropping(0)
    found = [("", train_one(rank, case, 1, lambda: every))]
    most = torch.tensor(every.n_seen)
    dist.all_reduce(most, dist.ReduceOp.MAX)  # ranks of a ring do not receive as often
    for number in range(1, most.item() + 1):
        without = Dropping(number)
        try:
            results = train_one(rank, case, 1, lambda without=without: without)
        except AssertionError:
            results = None
        found.append((without.dropped, results))
    return found


def is_missed(case, results):
    try:
        compare_one(case, results, 1)
    except AssertionError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("way", CASES)
def test_every_collective_of_a_step_is_missed(way):
    case = CASES[way]
    whole, *without = zip(*on_ranks(train_without_each, 2, case), strict=True)
    assert not is_missed(case, [results for _, results in whole])
    assert len(without) > case.config.n_layers
    for number, of_ranks in enumerate(without, 1):
        names, results = zip(*of_ranks, strict=True)
        assert None in results or is_missed(case, results), (number, names)


class Dying(TorchDispatchMode):
    """Ends this process at its second reduce-scatter, which is that of the first block's attention."""

    n_seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n_seen += func._overloadpacket.__name__ == "_reduce_scatter_base_"
        if self.n_seen == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


def lose_the_last(rank: Rank, case):
    """Seconds until the step ends on this rank, and whether it ends as another rank has gone."""
    step, batch = assemble(case, rank), random_batch(case, rank)
    step(*batch)
    dist.barrier()
    before = time.monotonic()
    try:
        with Dying() if rank.rank == rank.world_size - 1 else nullcontext():
            step(*batch)
    except RuntimeError as error:
        return time.monotonic() - before, is_peer_lost(error)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_collective_ends_those_that_share_its_matrices_and_its_sequences():
    """The last of four, whose neighbours wait for its rows and for its keys, and the first for these neighbours."""
    *others, last = spawn(lose_the_last, 4, run_of(2, 2, "ddp", QWEN2), apart=True)
    assert "SIGKILL" in last.failure
    for one in others:
        seconds, lost = one.returned
        assert lost and seconds < 60  # the time-out is ten minutes
