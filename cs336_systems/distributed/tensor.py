"""Tensor and sequence parallelism: a rank's part of every matrix, and the collectives between the parts.

    part = config.part(2)                             # half of the heads, of the feed-forward width, of the words
    ranks = GroupRanks(mesh.group("tensor"))
    model = TransformerLM(part, tensor_ops(ops, ranks), device="meta")
    write_out(model, block_ops, keep, Products(ranks))
    fill_from_whole(model, ranks)                     # then: model.to_empty(device=d).reset_parameters()

q | k | v and gate | up are divided by output features, output and down by input features (Shoeybi et al. 2019, section
3), embedding and head by vocabulary. Norms are replicated, but see only the rank's rows of the residual stream
(Korthikanti et al. 2022, section 4.2.2), so their gradients are summed over the ranks. A block has two all-gathers and
two reduce-scatters of rows in forward, and as many in backward. Results equal those of one process up to rounding.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cs336_systems.model import ModelOps
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks

DIVIDED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "w1", "w3", "token_embeddings", "lm_head"), 0),
    **dict.fromkeys(("output_proj", "w2"), 1),
}
"""The dimension along which a module's parameters are divided; other modules are replicated."""


class GroupRanks(TensorRanks):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.n_ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(x.shape[0] * self.n_ranks, *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole

    def scatter(self, x: Tensor) -> Tensor:
        own = x.new_empty(x.shape[0] // self.n_ranks, *x.shape[1:])
        dist.reduce_scatter_tensor(own, x.contiguous(), group=self.group)
        return own

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        together = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(together, group=self.group)
        return [
            part.view_as(tensor)
            for part, tensor in zip(together.split([t.numel() for t in tensors]), tensors, strict=True)
        ]

    def largest_(self, magnitudes: Tensor) -> Tensor:
        dist.all_reduce(as_integers(magnitudes), dist.ReduceOp.MAX, group=self.group)
        return magnitudes


def as_integers(magnitudes: Tensor) -> Tensor:
    """The bits of non-negative fp32 numbers as int32, which have the same order; NaN is the largest."""
    return magnitudes.view(torch.int32)


def tensor_dim(name: str) -> int | None:
    """The dimension along which tensor ranks divide the parameter of this name; None if it is replicated."""
    return DIVIDED.get(name.split(".")[-2])


def fill_from_whole(model: nn.Module, ranks: TensorRanks) -> None:
    """Make each ``reset_parameters`` draw the whole module's parameters and keep this rank's part.

    Only one module at a time is whole, while it is drawn. Checkpoints read ``model.tensor_ranks``, set here.
    """
    model.tensor_ranks = ranks  # type: ignore[assignment]
    for name, module in model.named_modules():
        if (dim := DIVIDED.get(name.rpartition(".")[2])) is not None:
            module.reset_parameters = partial(_draw, module, dim, ranks)


@torch.no_grad()
def _draw(module: nn.Module, dim: int, ranks: TensorRanks) -> None:
    parts = {name: part for name, part in module._parameters.items() if part is not None}
    for name, part in parts.items():
        shape = [size * (ranks.n_ranks if d == dim else 1) for d, size in enumerate(part.shape)]
        module._parameters[name] = nn.Parameter(part.new_empty(shape))
    type(module).reset_parameters(module)  # type: ignore[attr-defined]
    for name, part in parts.items():
        part.copy_(module._parameters[name].chunk(ranks.n_ranks, dim)[ranks.rank])  # type: ignore[union-attr]
        module._parameters[name] = part


@torch.no_grad()
def take_parts(model: nn.Module, whole: nn.Module) -> None:
    """Copy a whole model's parameters into ``model``; only this rank's parts if ``fill_from_whole`` has seen it."""
    ranks: TensorRanks = getattr(model, "tensor_ranks", ALONE)
    others = dict(whole.named_parameters())
    for name, own in model.named_parameters():
        dim, other = tensor_dim(name) if ranks.n_ranks > 1 else None, others[name]
        own.copy_(other if dim is None else other.chunk(ranks.n_ranks, dim)[ranks.rank])


class _Embedding(torch.autograd.Function):
    """``apply(token_ids, weight, ranks)``: this rank's rows (1, R/t, D) of the embeddings of ids (...)."""

    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight: Tensor, ranks: TensorRanks) -> Tensor:
        places = token_ids.flatten() - ranks.rank * len(weight)
        here = (places >= 0) & (places < len(weight))
        places = places.where(here, 0)
        ctx.save_for_backward(places, here)
        ctx.ranks, ctx.n_words = ranks, len(weight)
        return ranks.scatter(torch.where(here[:, None], weight[places], 0.0))[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor, None]:
        places, here = ctx.saved_tensors
        rows = ctx.ranks.gather(dx[0])
        dweight = rows.new_zeros(ctx.n_words, rows.shape[1])
        return None, dweight.index_add_(0, places, torch.where(here[:, None], rows, 0.0)), None


class _OfAllRows(torch.autograd.Function):
    """``apply(gain, ranks)`` returns the gain; its gradient is summed over the ranks, as each has different rows."""

    @staticmethod
    def forward(ctx: Any, gain: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return gain.view_as(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgain: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.total([dgain])[0], None


def tensor_ops(ops: ModelOps, ranks: TensorRanks) -> ModelOps:
    """The operations outside the blocks for a rank's part of a model; the loss takes the targets of all rows.

    ``ops.linear_cross_entropy`` must take ``ranks=``, as that of ``blocks.head_ops`` does. Without targets the model
    raises ValueError, as no rank has whole logits.
    """

    def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
        if token_ids.numel() % ranks.n_ranks:
            raise ValueError(f"{token_ids.numel()} tokens cannot be divided over {ranks.n_ranks} tensor ranks")
        return _Embedding.apply(token_ids, weight, ranks)

    def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        return ops.rms_norm(x, _OfAllRows.apply(gain, ranks), eps)

    def linear(*_: Any) -> NoReturn:
        raise ValueError(f"each of {ranks.n_ranks} tensor ranks has logits of its own words alone: give targets")

    loss = partial(ops.linear_cross_entropy, ranks=ranks)
    return replace(ops, embedding=embedding, linear=linear, rms_norm=rms_norm, linear_cross_entropy=loss)
