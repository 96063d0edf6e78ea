"""Backward passes of users under FSDP: recomputed, unfinished, partial, failed, repeated; against a single process."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.harness.traffic import Traffic

from .checks import on_each
from .fsdp_models import Block, Blocks, full_gradients
from .test_fsdp import batches, own_rows, wide_loss

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class DecoderLayer(nn.Module):
    """Runs its two halves again in backward: a module, and a function that reads the layer's own parameters."""

    def __init__(self, d=7, how=None):
        super().__init__()
        self.block = Block(d)
        self.gate = nn.Linear(d, d, bias=False)
        self.scale = nn.Parameter(torch.rand(d))
        self.how = how

    def forward(self, x):
        if self.how is None:
            return self.gated(self.block(x))
        x = checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
        return checkpoint(self.gated, x, use_reentrant=self.how == "reentrant")

    def gated(self, x):
        return x + torch.tanh(self.gate(x) @ self.gate.weight) * self.scale


class Decoder(nn.Module):
    """Ids (batch, seq) -> scores (batch, seq, 11), checkpointed inside its layers, around segments of them, or not."""

    def __init__(self, inside=None, around=None, length=1):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(DecoderLayer(how=inside) for _ in range(4))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.around, self.length = around, length

    def forward(self, ids):
        x = self.embedding(ids)
        for i in range(0, len(self.layers), self.length):
            segment = nn.Sequential(*self.layers[i : i + self.length])
            x = segment(x) if self.around is None else checkpoint(segment, x, use_reentrant=self.around == "reentrant")
        return self.head(x)


def by_layers(module):
    return isinstance(module, DecoderLayer)


def by_layers_and_blocks(module):
    return isinstance(module, (DecoderLayer, Block))


def check_gradients(fsdp, reference, **tolerance):
    """Ours are the reference's, and nothing is left whole."""
    for name, gradient in full_gradients(fsdp).items():
        expected = reference.get_parameter(name).grad
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, **(tolerance or CLOSE))
    assert all(group.unsharded_bytes == 0 for group in fsdp.groups)
    assert all(p.unsharded_param.grad is None for group in fsdp.groups for p in group.parameters)
    assert {p.data_ptr() for p in fsdp.parameters()} == {p.sharded_param.data_ptr() for p in fsdp.managed_parameters()}


def both(reference, fsdp, rank, ids):
    """A training pass on each side."""
    wide_loss(reference(ids), ids).backward()
    wide_loss(fsdp(own_rows(ids, rank)), own_rows(ids, rank)).backward()


def recomputation_inside_units_finds_their_parameters_whole(rank):
    """Inside layers, around them, or both; layers as units, with units inside them or without."""
    torch.manual_seed(0)
    reference = Decoder().double()
    state = reference.state_dict()
    (ids,) = batches(1)
    for how in ("nonreentrant", "reentrant"):
        for options in ({"inside": how}, {"around": how}, {"around": how, "length": 2}, {"inside": how, "around": how}):
            for units in (by_layers, by_layers_and_blocks):
                module = Decoder(**options).double()
                module.load_state_dict(state)
                fsdp = FSDP(module, units=units)
                for _ in range(2):
                    reference.zero_grad()
                    fsdp.zero_grad()
                    both(reference, fsdp, rank, ids)
                    check_gradients(fsdp, reference)


def a_step_needs_no_call_to_finish(rank):
    """Neither after one backward, nor after several, nor after some that were not to be synchronized."""
    torch.manual_seed(0)
    reference = Blocks().double()
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    ours = torch.optim.SGD(fsdp.parameters(), lr=0.1, momentum=0.9)
    for synchronized in ((True,), (True, True), (False, True), (True, False, False, True), (True,)):
        for synchronize, ids in zip(synchronized, batches(len(synchronized)), strict=True):
            with nullcontext() if synchronize else fsdp.no_sync():
                both(reference, fsdp, rank, ids)
        check_gradients(fsdp, reference)
        with Traffic() as log:
            fsdp.finish_gradient_synchronization()
            fsdp.finish_gradient_synchronization()
        assert log.sent == []
        check_gradients(fsdp, reference)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    norms = nn.Sequential(nn.Linear(7, 7).requires_grad_(False), nn.LayerNorm(7)).double()  # nothing sharded is trained
    x = (
        torch.randn(rank.world_size, 3, 7, generator=torch.Generator().manual_seed(1), device="cpu")
        .double()
        .to(rank.device)
    )
    alone = FSDP(copy.deepcopy(norms))
    norms(x).square().mean().backward()
    alone(x[rank.rank]).square().mean().backward()
    check_gradients(alone, norms)


class Failing(torch.autograd.Function):
    """The identity, whose backward fails if it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("backward cannot go on")
        return gradient, None


def a_failed_backward_leaves_nothing_to_the_next_step(rank):
    """Wherever it fails, also while a reduction is under way, and whatever had been accumulated."""
    torch.manual_seed(0)
    reference = Blocks().double()
    ids, more = batches(2)

    def forward(model, rows, fails_after):
        x = model.embedding(rows)
        for i, block in enumerate(model.blocks):
            x = Failing.apply(block(x), i == fails_after)
        return model.head(x)

    for fails_after in (0, 1, 3):
        fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
        fsdp.module.forward = lambda rows, fails_after=None, module=fsdp.module: forward(module, rows, fails_after)
        for accumulates in (False, True, False):
            reference.zero_grad()
            fsdp.zero_grad()
            both(reference, fsdp, rank, ids)
            check_gradients(fsdp, reference)
            reference.zero_grad()
            fsdp.zero_grad()
            with fsdp.no_sync() if accumulates else nullcontext():
                if accumulates:
                    wide_loss(fsdp(own_rows(more, rank)), own_rows(more, rank)).backward()
                for _ in range(2):
                    with pytest.raises(ArithmeticError, match="backward cannot go on"):
                        loss = wide_loss(fsdp(own_rows(more, rank), fails_after), own_rows(more, rank))
                        loss.backward(retain_graph=True)
            fsdp.zero_grad()


def zero_grad_clears_every_shard_after_a_failed_backward(rank):
    """Those too whose units were in the middle of it, and had gradients of an earlier one."""
    torch.manual_seed(0)
    fsdp = FSDP(Blocks().double(), units=lambda module: isinstance(module, Block))
    ids, _ = batches(2)
    rows = own_rows(ids, rank)
    wide_loss(fsdp(rows), rows).backward()
    inner = fsdp.module.blocks[1].forward
    fsdp.module.blocks[1].forward = lambda x: Failing.apply(inner(Failing.apply(x, True)), False)
    with pytest.raises(ArithmeticError, match="backward cannot go on"):
        wide_loss(fsdp(rows), rows).backward()
    assert all(parameter.sharded_param.grad is not None for parameter in fsdp.managed_parameters())
    fsdp.zero_grad()
    assert all(parameter.sharded_param.grad is None for parameter in fsdp.managed_parameters())


def zero_grad_gives_up_what_has_been_accumulated(rank):
    """As after an error in the forward of a later micro-batch."""
    torch.manual_seed(0)
    reference = Blocks().double()
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
    ids, more = batches(2)
    with fsdp.no_sync():
        wide_loss(fsdp(own_rows(more, rank)), own_rows(more, rank)).backward()
        fsdp.zero_grad()
    both(reference, fsdp, rank, ids)
    check_gradients(fsdp, reference)


class Sharing(nn.Module):
    """Ids -> scores; a module lies in an inner unit and in the outer one, which runs it before and after the inner."""

    class Inner(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared
            self.own = nn.Linear(7, 7)

        def forward(self, x):
            return x + torch.tanh(self.own(self.shared(x)))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(7, 7)
            self.inner = Sharing.Inner(self.shared)
            self.own = nn.Linear(7, 7)

        def forward(self, x):
            return self.own(self.shared(self.inner(torch.tanh(self.shared(x)))))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(self.Outer() for _ in range(3))
        self.head = nn.Linear(7, 11)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def graphs_of_nested_units_can_be_used_again(rank):
    """Backward twice over retained graphs, two forwards in turn; units inside units, with a module in common."""
    torch.manual_seed(0)
    reference = Sharing().double()
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, (Sharing.Inner, Sharing.Outer)))
    first, second = batches(2)
    for model, take in ((reference, lambda ids: ids), (fsdp, lambda ids: own_rows(ids, rank))):
        for _ in range(2):
            a, b = (wide_loss(model(take(ids)), take(ids)) for ids in (first, second))
            a.backward(retain_graph=True)
            b.backward(retain_graph=True)
            (a + b).backward(retain_graph=True)
            a.backward()
    check_gradients(fsdp, reference)


@dataclass
class Scored:
    """What a unit returns that is no container pytree knows."""

    scores: list[Tensor]
    note: str = ""


class Wrapped(nn.Module):
    """Ids -> scores; its block returns a dataclass that holds tensors in a list."""

    class Scoring(Block):
        def forward(self, x):
            return Scored([super().forward(x)])

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(self.Scoring(7) for _ in range(3))
        self.head = nn.Linear(7, 11)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x).scores[0]
        return self.head(x)


def outputs_may_lie_in_dataclasses(rank):
    torch.manual_seed(0)
    reference = Wrapped().double()
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Block))
    (ids,) = batches(1)
    for _ in range(2):
        both(reference, fsdp, rank, ids)
    check_gradients(fsdp, reference)


class Tied(Blocks):
    """Reads its embedding's weight without calling it."""

    def forward(self, ids):
        x = self.embedding(ids).to(self.blocks[0].up.weight.dtype)  # what a weight is like may be asked
        assert self.embedding.weight.shape == (11, 7)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embedding.weight)


def weights_that_are_read_outside_their_modules_are_told(rank):
    torch.manual_seed(0)
    (ids,) = batches(1)
    rows = own_rows(ids, rank)
    reference = Tied().double()
    for units in (None, lambda module: isinstance(module, Block)):
        fsdp = FSDP(copy.deepcopy(reference), units=units)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"embedding\.weight is read outside of its own module's call"):
                fsdp(rows)
        assert {p.shape for p in fsdp.parameters()} == {p.sharded_param.shape for p in fsdp.managed_parameters()}
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, Tied))
    both(reference, fsdp, rank, ids)
    check_gradients(fsdp, reference)

    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).double().eval()
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1), device="cpu").double().to(rank.device)
    sharded = FSDP(copy.deepcopy(layer))
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), layer(x), **CLOSE)  # no weights are read where they cannot be


def what_cannot_be_is_told(rank):
    fsdp = FSDP(Blocks())
    rows = own_rows(batches(1)[0], rank)
    with pytest.raises(RuntimeError, match=r"head is under FSDP, .* gradients of gradients"):
        torch.autograd.grad(wide_loss(fsdp(rows), rows), fsdp.module.blocks[0].norm.weight, create_graph=True)
    wide_loss(fsdp(rows), rows).backward()
    inside = Blocks()
    inside.blocks[1] = FSDP(inside.blocks[1])
    in_place = Blocks()
    for block in in_place.blocks:
        FSDP(block)
    for module, name in (
        (inside, r"blocks\.1"),
        (in_place, r"blocks\.0\.up"),
        (fsdp, "FSDP"),
        (fsdp.module, "embedding"),
    ):
        with pytest.raises(ValueError, match=name + " is under FSDP already: wrap the outermost module alone"):
            FSDP(module)


CHECKS = [
    graphs_of_nested_units_can_be_used_again,
    outputs_may_lie_in_dataclasses,
    weights_that_are_read_outside_their_modules_are_told,
    what_cannot_be_is_told,
    a_failed_backward_leaves_nothing_to_the_next_step,
    zero_grad_clears_every_shard_after_a_failed_backward,
    zero_grad_gives_up_what_has_been_accumulated,
    recomputation_inside_units_finds_their_parameters_whole,
    a_step_needs_no_call_to_finish,
]


test_on_two_ranks = pytest.mark.slow(on_each(2, CHECKS))
