"""Ranks of an FSDP model that differ: in the outputs that their losses use, or in what they run."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.distributed.fsdp import FSDP

from .checks import on_each
from .fsdp_models import Block, Blocks
from .test_fsdp import batches, own_rows, wide_loss
from .test_fsdp_backward import check_gradients


class Outputs(nn.Module):
    """Ids -> the scores of a trunk and of its three heads, as a list: a loss need not use them all."""

    def __init__(self):
        super().__init__()
        self.trunk = Blocks()
        self.heads = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))

    def forward(self, ids):
        x = self.trunk(ids)
        return [x, *(head(x) for head in self.heads)]


def check_two_passes(reference, fsdp, rank, loss_of):
    """Gradients are those of both ranks' mean loss, also in a second pass, which expects what the first one did.

    Args:
        loss_of: a model and a rank's number -> the loss of that rank's rows.
    """
    for _ in range(2):
        reference.zero_grad()
        fsdp.zero_grad()
        (sum(loss_of(reference, number) for number in range(2)) / 2).backward()
        loss_of(fsdp, rank.rank).backward()
        check_gradients(fsdp, reference)


def ranks_may_leave_different_outputs_out_of_the_loss(rank):
    """Whatever the gradient passes by on a rank: heads in the middle, first and last ones, and all blocks with them."""
    torch.manual_seed(0)
    reference = Outputs().double()
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
    (ids,) = batches(1)
    for used in (([1], [2]), ([3], [1, 2]), ([1, 3], [2]), ([0], [3]), ([1, 2, 3], [0]), ([1], [1])):

        def loss_of(model, number, used=used):
            rows = ids[2 * number : 2 * number + 2]
            outputs = model(rows)
            return sum(wide_loss(outputs[i], rows) for i in used[number])

        check_two_passes(reference, fsdp, rank, loss_of)


def ranks_may_leave_different_outputs_of_several_forwards_out(rank):
    """A forward that backward has come to is walked to its end before the next; one that a rank leaves out is told."""
    torch.manual_seed(0)
    reference = Outputs().double()
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
    batch = batches(3)

    def loss_of(model, number, used):
        own = [ids[2 * number : 2 * number + 2] for ids in batch]
        outputs = [model(rows) for rows in own]
        return sum(wide_loss(outputs[i][j], own[i]) for i, j in used[number])

    for used in ((((0, 1), (1, 0)), ((0, 0), (1, 3))), (((0, 2), (1, 1), (2, 0)), ((2, 3), (1, 0), (0, 3)))):
        reference.zero_grad()
        fsdp.zero_grad()
        (sum(loss_of(reference, number, used) for number in range(2)) / 2).backward()
        loss_of(fsdp, rank.rank, used).backward()
        check_gradients(fsdp, reference)
    for used, said in (
        ((((0, 1),), ((1, 1),)), "where rank 1 comes to the backward of its forward 2 of 3"),
        ((((0, 1), (1, 1)), ((1, 1),)), "where rank 1 ends a backward"),
    ):
        loss = loss_of(fsdp, rank.rank, used)
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
    torch.manual_seed(0)
    reference = Choosing().double()
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
    (ids,) = batches(1)
    for chosen in (([0, 0, 0], [2, 2, 2]), ([2, 1, 0], [0, 1, 2]), ([1, 1, 1], [1, 1, 1])):

        def loss_of(model, number, chosen=chosen):
            rows = ids[2 * number : 2 * number + 2]
            return wide_loss(model(rows, chosen[number]), rows)

        check_two_passes(reference, fsdp, rank, loss_of)


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
    """All of them, in the first forward and in later ones; if ranks change course alike, results are right."""
    torch.manual_seed(0)
    reference = Experts().double()
    (ids,) = batches(1)
    rows = own_rows(ids, rank)
    for grad in (True, False):
        for earlier in ((), ((0, 1),), ((0, 1), (0, 1), (2, 1), (0, 1))):
            for used, said in (
                (
                    ((0,), (1,)),
                    r"(experts\.0|last before experts\.1), where rank 1 calls experts\.1( before experts\.0)?$",
                ),
                (((0, 1), (0, 1, 2)), r"(calls last|ends a forward), where rank 1 calls experts\.2( before last)?$"),
                (((0,), ()), r"(experts\.0|last before experts\.1), where rank 1 calls last( before experts\.0)?$"),
            ):
                fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
                for names in earlier:
                    reference.zero_grad()
                    fsdp.zero_grad()
                    wide_loss(reference(ids, names), ids).backward()
                    wide_loss(fsdp(rows, names), rows).backward()
                    check_gradients(fsdp, reference)
                with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=said):
                    fsdp(rows, used[rank.rank])


def ranks_that_do_different_things_are_told(rank):
    (ids,) = batches(1)
    fsdp = FSDP(Blocks(), units=lambda module: isinstance(module, Block))
    wide_loss(fsdp(ids), ids).backward()
    loss = wide_loss(fsdp(ids), ids)
    with pytest.raises(RuntimeError, match="rank 0 begins a backward, where rank 1 begins a forward"):
        if rank.rank == 0:
            loss.backward()
        else:
            fsdp(ids)
    wide_loss(fsdp(ids), ids).backward()
    with pytest.raises(RuntimeError, match=r"rank 0 ends a forward, where rank 1 begins a forward before blocks\.2"):
        if rank.rank == 1:
            fsdp.module.blocks[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fsdp(ids)
        fsdp(ids)
    with fsdp.no_sync():
        fsdp.module.blocks[1]._forward_hooks.clear()
        wide_loss(fsdp(ids), ids).backward()
    with pytest.raises(RuntimeError, match="rank 0 averages accumulated gradients, where rank 1 begins a forward"):
        if rank.rank == 0:
            fsdp.finish_gradient_synchronization()
        else:
            fsdp(ids)


CHECKS = [
    ranks_may_leave_different_outputs_out_of_the_loss,
    ranks_may_leave_different_outputs_of_several_forwards_out,
    ranks_may_leave_different_blocks_out_in_reentrant_checkpoints,
    ranks_that_run_different_units_are_told,
    ranks_that_do_different_things_are_told,
]


test_on_two_ranks = pytest.mark.slow(on_each(2, CHECKS))
