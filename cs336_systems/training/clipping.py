"""The norm of a step's whole gradient, clipping by it, and skipping steps that are not finite; the host never waits.

    guard = GradientGuard(1.0)
    guard(model, optimizer, loss)        # in place of optimizer.step()
    guard.norm, guard.loss               # before clipping, and before the step; fp32, shape (), the same on every rank

Gradients may be whole on every rank, or shards of FSDP or of a ``ShardedOptimizer``, whose squares are then summed over
the ranks: one number. They are scaled by min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` does
(Pascanu et al. 2013), when the optimizer reads them.

A step whose norm or loss (the mean over the ranks) is NaN or inf changes neither parameters nor moments, and is not
counted. The host reads the norm one step late, when it may have enqueued the next step. So no later step changes
anything either: the model stays as it was before the failed step.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.norms import check_max_norm, clip_factor, joint_norm
from cs336_systems.distributed.pipeline import on_two_stages
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.tensor import tensor_dim


class GradientGuard:
    """Steps an optimizer: ``FusedAdamW``, torch's fused AdamW, or a ``ShardedOptimizer`` of one of these.

    Args:
        max_norm: the largest norm after clipping; infinite for no clipping.
        mesh: the ranks, if some share a batch; the norm is then the whole model's, in which a matrix that tensor ranks
            divide counts once, and so does a gain that all of them hold.

    Raises:
        ValueError: ``max_norm`` is not positive.
    """

    def __init__(self, max_norm: float = math.inf, mesh: Mesh | None = None) -> None:
        check_max_norm(max_norm)
        self.max_norm, self.mesh = max_norm, mesh
        self.norm: Tensor | None = None
        """The norm of the last step, at a fixed address, so that a CUDA graph can write it."""
        self.loss: Tensor | None = None
        """The loss of the last step, the mean over the ranks, also at a fixed address; 0 if none was given."""
        self._halted: Tensor | None = None
        self._tables: dict[str, Any] = {}

    @torch.no_grad()
    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor | None = None) -> None:
        """Step on the present gradients; a collective if there are several ranks.

        Args:
            loss: this rank's, one element on the device; given on all ranks or on none.
        """
        scale, skipped = self.scale(*self._norm_and_loss(model, optimizer, loss))
        inner = optimizer.local if isinstance(optimizer, ShardedOptimizer) else optimizer
        if isinstance(inner, torch.optim.AdamW):  # attributes that torch's GradScaler sets
            inner.grad_scale, inner.found_inf = scale.reciprocal(), skipped  # type: ignore[attr-defined]
            optimizer.step()
        else:
            optimizer.step(grad_scale=scale)  # type: ignore[call-overload]

    def scale(self, norm: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Record norm and loss; returns (factor for the gradients, NaN to skip the step; 1 if it is skipped, else 0).

        For callers that step an optimizer piece by piece; all arguments and results are () on the device.
        """
        if self.norm is None or self.loss is None or self._halted is None:
            self.norm, self.loss, self._halted = torch.empty_like(norm), torch.empty_like(norm), torch.zeros_like(norm)
        self.norm.copy_(norm)
        self.loss.copy_(loss)
        broken = (norm.isfinite() & loss.isfinite()).logical_not()
        skipped = self._halted.copy_(torch.maximum(self._halted, broken.float()))
        return torch.where(skipped > 0, math.nan, clip_factor(norm, self.max_norm)), skipped

    def _norm_and_loss(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(Norm of the whole gradient, mean of the loss over the ranks), in fp32 and of shape ()."""
        device, host_gradients = next(model.parameters()).device, getattr(optimizer, "host_gradients", None)
        mean = torch.zeros((), device=device) if loss is None else loss.detach().float().reshape(())
        shares = None
        if host_gradients is not None and device.type == "cuda":
            norm = host_gradients.norm()
        else:
            shares, whole = gradients_of(model, optimizer)
            if self.mesh is not None:
                twice = on_two_stages(getattr(model, "module", model))
                return self._norm_on(self.mesh, shares or {}, whole, twice, mean)
            norm = self.norm_of("whole", list(whole.values()), device)
        group = model.process_group if isinstance(model, FSDP) else None
        if isinstance(model, FSDP) and model.has_replicas:
            raise ValueError("replicas of FSDP's shards need GradientGuard(mesh=...), which knows all ranks")
        if isinstance(optimizer, ShardedOptimizer):
            group = optimizer.member.group
        n_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        if shares is None and (loss is None or n_ranks == 1):
            return norm, mean
        squares = torch.zeros_like(norm)
        if shares is not None:
            squares = self.norm_of("shares", list(shares.values()), device).square()
        shared = torch.stack([squares, mean / n_ranks])
        dist.all_reduce(shared, group=group)
        return norm if shares is None else (shared[0] + norm.square()).sqrt(), shared[1]

    def _norm_on(
        self, mesh: Mesh, shares: dict[str, Tensor], whole: dict[str, Tensor], twice: Sequence[str], mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``_norm_and_loss``, by summing over all ranks each element's square / the number of ranks that hold it.

        Args:
            twice: names of parameters that two pipeline stages hold.
        """
        n_alike, squares = mesh.same_weights.size(), torch.zeros_like(mean)
        for kind, gradients, n_held in (("shares", shares, mesh.size("replica")), ("whole", whole, n_alike)):
            for divided, doubled in product((True, False), repeat=2):
                n_ranks = n_held * (1 if divided else mesh.size("tensor")) * (1 + doubled)
                found = [
                    each
                    for name, each in gradients.items()
                    if (tensor_dim(name) is not None) == divided and (name in twice) == doubled
                ]
                squares += self.norm_of(f"{kind} {divided} {doubled}", found, mean.device).square() / n_ranks
        shared = torch.stack([squares, mean / mesh.rank.world_size])
        dist.all_reduce(shared)
        return shared[0].sqrt(), shared[1]

    def norm_of(self, name: str, gradients: list[Tensor], device: torch.device) -> Tensor:
        """The joint L2 norm of all gradients, at least fp32, shape (); ``name`` identifies one of several sets."""
        if device.type != "cuda" or not gradients:
            return joint_norm(gradients, device)
        from cs336_systems.kernels.grad_norm import grad_norm, norm_table  # brings Triton along

        return grad_norm(gradients, self._tables.setdefault(name, norm_table()))


def gradients_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """(Gradients of which this rank has a shard, None if there are none; gradients that it has whole), by name."""
    if isinstance(model, FSDP):
        shards = {p.names[0]: p.sharded_param.grad for group in model.groups for p in group.parameters}
        replicated = {p.names[0]: p.sharded_param.grad for p in model.replicated}
        shares, whole = (
            {name: one.detach() for name, one in each.items() if one is not None} for each in (shards, replicated)
        )
        return {name: one for name, one in shares.items() if one.numel()}, whole
    named = dict(getattr(model, "module", model).named_parameters())  # a wrapper's parameters have other names
    whole = {name: p.grad for name, p in named.items() if p.grad is not None}
    if (host_gradients := getattr(optimizer, "host_gradients", None)) is not None:
        whole = {str(number): one for number, one in enumerate(host_gradients.tensors())}
    if not isinstance(optimizer, ShardedOptimizer) or optimizer.world_size == 1:
        return None, whole
    if optimizer.reduce_gradients is None:
        return None, whole
    optimizer.reduced_gradients()
    pieces = {name: optimizer.pieces[p].tensor.grad for name, p in named.items() if p in optimizer.pieces}
    return {name: one for name, one in pieces.items() if one is not None}, {}
