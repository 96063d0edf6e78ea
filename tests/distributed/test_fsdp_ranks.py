"""Ranks of an FSDP model that differ: in the outputs that their losses use, or in what they run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed import presence

from .checks import checks_of, on_each, spawn
from .fsdp_models import Block, Blocks, batches, both, by_blocks, check_gradients, loss_of, own_rows, sharded, zero_grad


class Outputs(nn.Module):
    """Ids -> the scores of a trunk and of its three heads, as a list: a loss need not use them all."""

    def __init__(self):
        super().__init__()
        self.trunk = Blocks()
        self.heads = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))

    def forward(self, ids):
        x = self.trunk(ids)
        return [x, *(head(x) for head in self.heads)]


def assert_passes_agree(reference, fsdp, rank, loss_on, n_passes=2):
    """Gradients are those of both ranks' mean loss, also in a second pass, which expects what the first one did.

    Args:
        loss_on: takes a model and a rank's number, and returns the loss of that rank's rows.
    """
    for _ in range(n_passes):
        zero_grad(reference, fsdp)
        (sum(loss_on(reference, number) for number in range(2)) / 2).backward()
        loss_on(fsdp, rank.rank).backward()
        check_gradients(fsdp, reference)


def check_ranks_may_leave_different_outputs_out_of_the_loss(rank):
    """Whatever the gradient passes by on a rank: heads in the middle, first and last ones, and all blocks with them."""
    reference, fsdp = sharded(Outputs, units=by_blocks)
    (ids,) = batches(1)
    for used in (([1], [2]), ([3], [1, 2]), ([1, 3], [2]), ([0], [3]), ([1, 2, 3], [0]), ([1], [1])):

        def loss_on(model, number, used=used):
            rows = ids[2 * number : 2 * number + 2]
            outputs = model(rows)
            return sum(loss_of(outputs[i], rows) for i in used[number])

        assert_passes_agree(reference, fsdp, rank, loss_on)


def check_ranks_may_leave_different_outputs_of_several_forwards_out(rank):
    """A forward that backward has come to is walked to its end before the next; one that a rank leaves out is told."""
    reference, fsdp = sharded(Outputs, units=by_blocks)
    batch = batches(3)

    def loss_on(model, number, used):
        own = [ids[2 * number : 2 * number + 2] for ids in batch]
        outputs = [model(rows) for rows in own]
        return sum(loss_of(outputs[i][j], own[i]) for i, j in used[number])

    for used in ((((0, 1), (1, 0)), ((0, 0), (1, 3))), (((0, 2), (1, 1), (2, 0)), ((2, 3), (1, 0), (0, 3)))):
        assert_passes_agree(reference, fsdp, rank, lambda model, number, used=used: loss_on(model, number, used), 1)
    for used, said in (
        ((((0, 1),), ((1, 1),)), "where rank 1 comes to the backward of its forward 2 of 3"),
        ((((0, 1), (1, 1)), ((1, 1),)), "where rank 1 ends a backward"),
    ):
        loss = loss_on(fsdp, rank.rank, used)
        with pytest.raises(RuntimeError, match=f"rank 0 comes to the backward of its forward . of 3, {said}"):
            loss.backward()


class Experts(nn.Module):
    """Ids -> scores, by those of three experts that the call names, between two blocks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.experts = nn.ModuleList(Block(7) for _ in range(3))
        self.last = Block(7)
        self.head = nn.Linear(7, 11)

    def forward(self, ids, used):
        x = self.embedding(ids)
        for i in used:
            x = self.experts[i](x)
        return self.head(self.last(x))


def check_ranks_that_run_different_units_are_told(rank):
    """All of them are, in the first forward and in later ones; if ranks change course alike, results are right."""
    (ids,) = batches(1)
    for earlier in ((), ((0, 1), (0, 1), (2, 1), (0, 1))):
        for used in (((0,), (1,)), ((0, 1), (0, 1, 2)), ((0,), ())):
            reference, fsdp = sharded(Experts, units=by_blocks)
            for names in earlier:
                zero_grad(reference, fsdp)
                both(reference, fsdp, rank, ids, names)
                check_gradients(fsdp, reference)
            with torch.set_grad_enabled(len(used[1]) > 1), pytest.raises(RuntimeError, match="where rank 1 calls"):
                fsdp(own_rows(ids, rank), used[rank.rank])


def check_ranks_that_do_different_things_are_told(rank):
    (ids,) = batches(1)
    _, fsdp = sharded(Blocks, units=by_blocks)
    loss_of(fsdp(ids), ids).backward()
    loss = loss_of(fsdp(ids), ids)
    with pytest.raises(RuntimeError, match="rank 0 begins a backward, where rank 1 begins a forward"):
        if rank.rank == 0:
            loss.backward()
        else:
            fsdp(ids)
    loss_of(fsdp(ids), ids).backward()
    with pytest.raises(RuntimeError, match=r"rank 0 ends a forward, where rank 1 begins a forward before blocks\.2"):
        if rank.rank == 1:
            fsdp.module.blocks[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fsdp(ids)
        fsdp(ids)
    with fsdp.no_sync():
        fsdp.module.blocks[1]._forward_hooks.clear()
        loss_of(fsdp(ids), ids).backward()
    with pytest.raises(RuntimeError, match="rank 0 averages accumulated gradients, where rank 1 begins a forward"):
        if rank.rank == 0:
            fsdp.finish_gradient_synchronization()
        else:
            fsdp(ids)


def check_a_rank_that_falls_silent_is_named(rank):
    """As one whose node has gone."""
    _, fsdp = sharded(lambda: nn.Linear(4, 4))
    if rank.rank == 1:
        presence.presence_of_this_rank()._left.set()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presence, "_SILENCE_S", 1.0)
        with pytest.raises(dist.DistError, match="rank 1 has left: its process or node was silent for"):
            fsdp(torch.ones(2, 4).double())


def wait_for_a_rank_that_has_left(rank):
    """Rank 1 leaves, as one that had fewer batches; rank 0 hears it, and waits neither for a silence nor a time-out."""
    _, fsdp = sharded(lambda: nn.Linear(4, 4))
    if rank.rank == 1:
        return
    with pytest.raises(dist.DistError, match="rank 1 has left: it has left the process group"):
        fsdp(torch.ones(2, 4).double())


@pytest.mark.slow
def test_a_rank_that_leaves_is_named():
    spawn(wait_for_a_rank_that_has_left, 2)


CHECKS = [check_ranks_may_leave_different_outputs_out_of_the_loss, check_ranks_that_run_different_units_are_told]
test_on_two_ranks = pytest.mark.slow(on_each(2, checks_of(globals())))
