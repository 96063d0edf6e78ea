"""Ranks of an FSDP model that differ: in the outputs that their losses use, or in what they run."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .checks import on_each
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


def check_passes(reference, fsdp, rank, loss_on, n_passes=2):
    """Gradients are those of both ranks' mean loss, also in a second pass, which expects what the first one did.

    Args:
        loss_on: takes a model and a rank's number, and returns the loss of that rank's rows.
    """
    for _ in range(n_passes):
        zero_grad(reference, fsdp)
        (sum(loss_on(reference, number) for number in range(2)) / 2).backward()
        loss_on(fsdp, rank.rank).backward()
        check_gradients(fsdp, reference)


def ranks_may_leave_different_outputs_out_of_the_loss(rank):
    """Whatever the gradient passes by on a rank: heads in the middle, first and last ones, and all blocks with them."""
    reference, fsdp = sharded(Outputs, units=by_blocks)
    (ids,) = batches(1)
    for used in (([1], [2]), ([3], [1, 2]), ([1, 3], [2]), ([0], [3]), ([1, 2, 3], [0]), ([1], [1])):

        def loss_on(model, number, used=used):
            rows = ids[2 * number : 2 * number + 2]
            outputs = model(rows)
            return sum(loss_of(outputs[i], rows) for i in used[number])

        check_passes(reference, fsdp, rank, loss_on)


def ranks_may_leave_different_outputs_of_several_forwards_out(rank):
    """A forward that backward has come to is walked to its end before the next; one that a rank leaves out is told."""
    reference, fsdp = sharded(Outputs, units=by_blocks)
    batch = batches(3)

    def loss_on(model, number, used):
        own = [ids[2 * number : 2 * number + 2] for ids in batch]
        outputs = [model(rows) for rows in own]
        return sum(loss_of(outputs[i][j], own[i]) for i, j in used[number])

    for used in ((((0, 1), (1, 0)), ((0, 0), (1, 3))), (((0, 2), (1, 1), (2, 0)), ((2, 3), (1, 0), (0, 3)))):
        check_passes(reference, fsdp, rank, lambda model, number, used=used: loss_on(model, number, used), 1)
    for used, said in (
        ((((0, 1),), ((1, 1),)), "where rank 1 comes to the backward of its forward 2 of 3"),
        ((((0, 1), (1, 1)), ((1, 1),)), "where rank 1 ends a backward"),
    ):
        loss = loss_on(fsdp, rank.rank, used)
        with pytest.raises(RuntimeError, match=f"rank 0 comes to the backward of its forward . of 3, {said}"):
            loss.backward()


class Choosing(nn.Module):
    """Ids -> scores; every segment runs all its blocks, and goes on with one of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.segments = nn.ModuleList(nn.ModuleList(Block(7) for _ in range(3)) for _ in range(3))
        self.head = nn.Linear(7, 11)

    def forward(self, ids, chosen):
        x = self.embedding(ids)
        for blocks, number in zip(self.segments, chosen, strict=True):
            x = checkpoint(lambda x, blocks=blocks, n=number: [block(x) for block in blocks][n], x, use_reentrant=True)
        return self.head(x)


def ranks_may_leave_different_blocks_out_in_reentrant_checkpoints(rank):
    """The gradient passes blocks by in each of several segments, and each has a backward of its own."""
    reference, fsdp = sharded(Choosing, units=by_blocks)
    (ids,) = batches(1)
    for chosen in (([0, 0, 0], [2, 2, 2]), ([2, 1, 0], [0, 1, 2]), ([1, 1, 1], [1, 1, 1])):

        def loss_on(model, number, chosen=chosen):
            rows = ids[2 * number : 2 * number + 2]
            return loss_of(model(rows, chosen[number]), rows)

        check_passes(reference, fsdp, rank, loss_on)


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


def ranks_that_run_different_units_are_told(rank):
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


def ranks_that_do_different_things_are_told(rank):
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


CHECKS = [ranks_may_leave_different_outputs_out_of_the_loss, ranks_that_run_different_units_are_told]
test_on_two_ranks = pytest.mark.slow(
    on_each(
        2,
        [
            *CHECKS,
            ranks_may_leave_different_outputs_of_several_forwards_out,
            ranks_may_leave_different_blocks_out_in_reentrant_checkpoints,
            ranks_that_do_different_things_are_told,
        ],
    )
)
