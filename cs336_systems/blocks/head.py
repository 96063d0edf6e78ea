"""Head and loss for written-out blocks: never the logits of all tokens, and gradients computed in forward.

A loss is a scalar, so its gradients are known in forward but for one factor: chunk by chunk of tokens logits are
computed, turned into their gradient, and multiplied into those of input and weight. ``linear_cross_entropy`` here does
so in plain PyTorch, on any device and in any float dtype; ``kernels.linear_cross_entropy`` is the same in few launches.
The final norm, in front of it, is an operation and a module of its own, and so is the head: wrappers and ranges see
both called.

    model = TransformerLM(config, head_ops("reference", REFERENCE_OPS))
    model(token_ids, targets).backward()

Kept between forward and backward: the input of the norm and its statistic, and the gradients of the head's input and
weight. A tied embedding has its two gradients added up by autograd, as anywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.model import ModelOps

CHUNK = 1024
"""Tokens whose logits exist at a time, unless the caller says otherwise."""


def head_ops(kernels: str, ops: ModelOps, z_loss: float = 0.0, chunk: int | None = None) -> ModelOps:
    """Give ``ops`` the loss in chunks, by a name of ``config.KERNELS``; ``fused`` brings its norm, too.

    Args:
        z_loss: that of ``linear_cross_entropy``, where gradients are taken; a loss that is only evaluated has none.
        chunk: tokens whose logits exist at a time; None for the operation's own choice.
    """
    if kernels == "reference":
        return replace(ops, linear_cross_entropy=_with(linear_cross_entropy, z_loss, chunk))
    from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy as fused  # not every machine has Triton
    from cs336_systems.kernels.rms_norm import rms_norm

    return replace(ops, rms_norm=rms_norm, linear_cross_entropy=_with(fused, z_loss, chunk))


def _with(loss: Callable[..., Tensor], z_loss: float, chunk: int | None) -> Callable[..., Tensor]:
    if chunk is not None:
        loss = partial(loss, chunk=chunk)
    if not z_loss:
        return loss
    return lambda *arguments: loss(*arguments, z_loss=z_loss if torch.is_grad_enabled() else 0.0)


def linear_cross_entropy_forward_backward(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    grad_weight: Tensor,
    denominator: Tensor,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(loss (), dx (T, D)), outside of autograd; the gradient of the weight is added to ``grad_weight``.

    Args:
        denominator: () on the device of x, by which the sum over the targets that count is divided.
    """
    dx = torch.empty_like(x_TD)
    with torch.no_grad():
        loss = _in_chunks(x_TD, weight_VD, targets_T, denominator, dx, grad_weight, ignore_index, z_loss, chunk)
    return loss, dx


def _in_chunks(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    denominator: Tensor,
    dx_TD: Tensor | None,
    dweight_VD: Tensor | None,
    ignore_index: int,
    z_loss: float,
    chunk: int,
) -> Tensor:
    """The loss; with p = softmax(logits), n targets that count: dlogits = (p (1 + 2 z_loss lse) - [target]) / n.

    dx is overwritten, dweight added to.
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x_TD.device)
    for start in range(0, len(x_TD), chunk):
        x, targets = x_TD[start : start + chunk], targets_T[start : start + chunk]
        counts = targets != ignore_index
        logits, places = (x @ weight_VD.T).to(wide), targets.where(counts, 0)[:, None]
        lse = torch.logsumexp(logits, dim=-1)
        losses = lse - logits.gather(1, places).squeeze(1) + z_loss * lse.square()
        total += losses.where(counts, 0.0).sum()
        if dx_TD is not None or dweight_VD is not None:
            dlogits = torch.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None]
            dlogits.scatter_add_(1, places, torch.full_like(places, -1, dtype=wide))
            dlogits = (dlogits / denominator).where(counts[:, None], 0.0).to(x.dtype)
        if dx_TD is not None:
            torch.mm(dlogits, weight_VD, out=dx_TD[start : start + chunk])
        if dweight_VD is not None:
            dweight_VD.addmm_(dlogits.T, x)
    return total / denominator


class _Known(torch.autograd.Function):
    """``apply(x, weight, (loss, dx, dweight))`` is the loss, whose gradients by x and weight are known already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, known: tuple[Tensor, Tensor | None, Tensor | None]) -> Tensor:
        loss, *gradients = known
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if gradient is None else gradient * arriving for gradient in ctx.saved_tensors)
        return *found, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int = CHUNK,
) -> Tensor:
    """Cross entropy of ``x @ weight.T``, in nats: x (..., D), weight (V, D), int64 targets (...) -> scalar.

    The result is at least fp32. If no target counts, the mean is NaN and gradients are zero, as of
    ``torch.nn.functional.cross_entropy``.

    Args:
        ignore_index: targets of this value do not count, for the mean neither.
        z_loss: adds z_loss * logsumexp(logits)^2 to each target's loss.
        chunk: tokens whose logits exist at a time.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, a chunk below 1, or, on a CPU, a target out of range.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, got {reduction!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")
    if x.shape[:-1] != targets.shape or weight.shape[1:] != x.shape[-1:]:
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)}"
        raise ValueError(f"{shapes} are not (..., d), (words, d) and (...)")
    x_TD, targets_T = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1)
    counts = targets_T != ignore_index
    if targets.is_cpu and len(wrong := targets_T[counts & ((targets_T < 0) | (targets_T >= len(weight)))]):
        raise ValueError(f"target {wrong[0].item()} is neither in [0, {len(weight)}) nor {ignore_index}, ignored")
    denominator = counts.sum() if reduction == "mean" else torch.ones((), dtype=torch.int64, device=x.device)
    recorded = torch.is_grad_enabled()
    dx = torch.empty_like(x_TD) if recorded and x.requires_grad else None
    dweight = torch.zeros_like(weight) if recorded and weight.requires_grad else None
    with torch.no_grad():
        loss = _in_chunks(x_TD, weight, targets_T, denominator, dx, dweight, ignore_index, z_loss, chunk)
    found: Tensor = _Known.apply(x_TD, weight, (loss, dx, dweight))
    return found
