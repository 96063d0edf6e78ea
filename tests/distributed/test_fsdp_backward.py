"""Backward passes of users under FSDP: recomputed, unfinished, partial, failed, repeated; against a single process."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.harness.traffic import Traffic

from .checks import checks_of, on_each
from .fsdp_models import (
    CLOSE,
    Block,
    Blocks,
    batches,
    both,
    by_blocks,
    check_gradients,
    loss_of,
    own_rows,
    sharded,
    zero_grad,
)


class Layer(nn.Module):
    """Runs its two halves again in backward: a module, and a function that reads the layer's own parameters."""

    def __init__(self, how):
        super().__init__()
        self.block = Block(7)
        self.gate = nn.Linear(7, 7, bias=False)
        self.scale = nn.Parameter(torch.rand(7))
        self.how = how

    def forward(self, x):
        if self.how is None:
            return self.gated(self.block(x))
        x = checkpoint(self.block, x, **self.how)
        return checkpoint(self.gated, x, **self.how)

    def gated(self, x):
        return x + torch.tanh(self.gate(x) @ self.gate.weight) * self.scale


class Decoder(Blocks):
    """Checkpointed inside its layers, around segments of them, or not."""

    def __init__(self, inside=None, around=None, length=1):
        super().__init__(n_blocks=0)
        self.layers = nn.ModuleList(Layer(inside) for _ in range(4))
        self.around, self.length = around, length

    def forward(self, ids):
        x = self.embedding(ids)
        for i in range(0, len(self.layers), self.length):
            segment = nn.Sequential(*self.layers[i : i + self.length])
            x = segment(x) if self.around is None else checkpoint(segment, x, **self.around)
        return self.head(x)


def check_recomputation_inside_units_finds_their_parameters_whole(rank):
    """It happens inside layers, around them, or both; layers are units, with units inside them or without."""
    (ids,) = batches(1)
    how = {"use_reentrant": False}
    for options in ({"inside": how}, {"around": how, "length": 2}, {"inside": how, "around": how}):
        for kinds in (Layer, (Layer, Block)):
            _, fsdp = sharded(lambda o=options: Decoder(**o), units=lambda module, k=kinds: isinstance(module, k))
            reference, _ = sharded(Decoder)
            for _ in range(2):
                zero_grad(reference, fsdp)
                both(reference, fsdp, rank, ids)
                check_gradients(fsdp, reference)
    _, fsdp = sharded(lambda: Decoder(around={"use_reentrant": True}), units=lambda module: isinstance(module, Layer))
    with pytest.raises(RuntimeError, match=r"layers\.3 .*use_reentrant=False"):
        both(reference, fsdp, rank, ids)


def check_a_step_needs_no_call_to_finish(rank):
    """That holds after one backward, after several, and after some that were not to be synchronized."""
    reference, fsdp = sharded(Blocks, units=by_blocks)
    for synchronized in ((True,), (True, True), (True, False, False, True)):
        zero_grad(reference, fsdp)
        for synchronize, ids in zip(synchronized, batches(len(synchronized)), strict=True):
            with nullcontext() if synchronize else fsdp.no_sync(), Traffic() as log:
                both(reference, fsdp, rank, ids)
            assert synchronize or not any("reduce_scatter" in event.kind for event in log.sent)
        check_gradients(fsdp, reference)
        with Traffic() as log:
            fsdp.finish_gradient_synchronization()
        assert log.sent == []
        check_gradients(fsdp, reference)


def check_accumulated_gradients_are_finished_without_another_backward(rank):
    """Nothing trained need be sharded for that."""
    for make in (
        lambda: nn.LayerNorm(7),
        lambda: nn.Sequential(nn.Linear(7, 7).requires_grad_(False), nn.LayerNorm(7)),
    ):
        reference, fsdp = sharded(make)
        x = torch.randn(rank.world_size, 3, 7, generator=torch.Generator().manual_seed(1), device="cpu")
        x = x.to(rank.device).double()
        for _ in range(2):
            reference(x).square().mean().backward()
            with pytest.raises(KeyError), fsdp.no_sync():
                fsdp(x[rank.rank]).square().mean().backward()
                raise KeyError
        fsdp.finish_gradient_synchronization()
        check_gradients(fsdp, reference)
        reference(x).square().mean().backward()
        fsdp(x[rank.rank]).square().mean().backward()
        check_gradients(fsdp, reference)


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


class Fragile(Blocks):
    """Its backward fails after the block of a number."""

    fails_after = None

    def forward(self, ids):
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            x = Failing.apply(block(x), i == self.fails_after)
        return self.head(x)


def check_a_failed_backward_leaves_nothing_to_the_next_step(rank):
    """It fails anywhere, also while a reduction is under way, and whatever had been accumulated."""
    ids, more = batches(2)
    for fails_after in (0, 1, 3):
        reference, fsdp = sharded(Fragile, units=by_blocks)
        for accumulates in (False, True, False):
            zero_grad(reference, fsdp)
            both(reference, fsdp, rank, ids)
            check_gradients(fsdp, reference)
            with fsdp.no_sync() if accumulates else nullcontext():
                if accumulates:
                    fsdp.zero_grad()
                    loss_of(fsdp(own_rows(more, rank)), own_rows(more, rank)).backward()
                fsdp.module.fails_after = fails_after
                for _ in range(2):
                    with pytest.raises(ArithmeticError):
                        loss_of(fsdp(own_rows(more, rank)), own_rows(more, rank)).backward(retain_graph=True)
                fsdp.module.fails_after = None


class Tied(Blocks):
    """Reads its embedding's weight without calling it."""

    def forward(self, ids):
        x = self.embedding(ids).to(self.blocks[0].up.weight.dtype)  # the dtype and shape of a weight may be asked
        assert self.embedding.weight.shape == (11, 7)
        return nn.functional.linear(self.blocks[0](x), self.embedding.weight)


def check_weights_that_are_read_outside_their_modules_are_refused(rank):
    (ids,) = batches(1)
    rows = own_rows(ids, rank)
    for units in (None, by_blocks):
        _, fsdp = sharded(Tied, units=units)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"embedding\.weight is read outside"):
                fsdp(rows)
        assert {p.shape for p in fsdp.parameters()} == {p.sharded_param.shape for p in fsdp.managed_parameters()}
    reference, fsdp = sharded(Tied, units=lambda module: isinstance(module, Tied))
    both(reference, fsdp, rank, ids)
    check_gradients(fsdp, reference)
    # PyTorch's fast path of this layer would read its children's weights.
    layer, fsdp = sharded(lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval())
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1), device="cpu").double().to(rank.device)
    with torch.no_grad():
        torch.testing.assert_close(fsdp(x), layer(x), **CLOSE)


def check_gradients_of_gradients_are_refused(rank):
    _, fsdp = sharded(Blocks)
    rows = own_rows(batches(1)[0], rank)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss_of(fsdp(rows), rows), fsdp.module.blocks[0].norm.weight, create_graph=True)
    loss_of(fsdp(rows), rows).backward()


test_on_two_ranks = pytest.mark.slow(on_each(2, checks_of(globals())))
