"""RMSNorm in Triton, forward and backward, with or without the residual add in front of it.

Formula, for each row of x (R, D) or of x + branch, with a gain (D); dy and dresidual are the gradients that arrive at y
and, from the residual path, at x:

    rstd          = 1 / sqrt(mean_d x^2 + eps)
    y             = x * rstd * gain
    dx            = rstd * (dy * gain - x * rstd^2 * mean_d(dy * gain * x)) + dresidual
    dgain         = sum_r dy * x * rstd

Computed in fp32, whatever the dtype, and rounded where ``model.ops.rms_norm`` rounds: x + branch once, which is the
new residual; x * rstd *before* the gain is multiplied; y. Backward rounds each of its results once, and takes x * rstd
as it was before it was rounded.

Method: ``rms_norm_kernels.py``.

Traffic, in passes over (R, D): forward 2 (reads x, writes y), with the add 4 (reads x and branch, writes residual and
y); backward 3 (reads x and dy, writes dx), with dresidual 4. Besides, rstd takes 4 bytes per row, and dgain's buffer is
written and read once: 8 D bytes per program. Some ten FLOPs per element: the bound is memory.

Limits: fp32, bf16, fp16, one dtype for all but rstd. Each D is compiled for itself.

    y = rms_norm(x, weight, eps)    # ModelOps' signature, for autograd
    y_RD, rstd_R = rms_norm_forward(x_RD, gain_D, eps)    # plain operators, for who writes backward out
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.kernels.launching import check_alike, check_runnable, operator
from cs336_systems.kernels.rms_norm_kernels import launch_backward, launch_forward, rms_norm_forward_kernel


def _forward_results(x_RD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x_RD.new_empty(x_RD.shape), x_RD.new_empty(x_RD.shape[:1], dtype=torch.float32)


def _add_forward_results(x_RD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x_RD.new_empty(x_RD.shape), *_forward_results(x_RD)


def _backward_results(dy_RD: Tensor, x_RD: Tensor, gain_D: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x_RD.new_empty(x_RD.shape), gain_D.new_empty(gain_D.shape)


@operator("rms_norm_forward", _forward_results, mutates=("absmax",))
def rms_norm_forward(x_RD: Tensor, gain_D: Tensor, eps: float, absmax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y (R, D) in x's dtype, rstd (R) in fp32).

    Args:
        absmax: one fp32 element, which is raised to the largest magnitude of y.
    """
    _, y, rstd = launch_forward(x_RD, None, gain_D, eps, absmax)
    return y, rstd


@operator("add_rms_norm_forward", _add_forward_results, mutates=("absmax",))
def add_rms_norm_forward(
    x_RD: Tensor, branch_RD: Tensor, gain_D: Tensor, eps: float, absmax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(residual = x + branch, its norm y, both (R, D) in x's dtype, rstd (R) in fp32).

    Args:
        absmax: one fp32 element, which is raised to the largest magnitude of y.
    """
    return launch_forward(x_RD, branch_RD, gain_D, eps, absmax)


@operator("rms_norm_backward", _backward_results, mutates=("absmax",))
def rms_norm_backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    gain_D: Tensor,
    rstd_R: Tensor | None,
    dresidual_RD: Tensor | None = None,
    eps: float | None = None,
    absmax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx (R, D) in x's dtype, dgain (D) in gain's); x is the residual where a branch was added.

    Args:
        rstd_R: from forward, or None to compute it again with ``eps``, to the same bits.
        dresidual_RD: another gradient of x, to be added.
        absmax: one fp32 element, which is raised to the largest magnitude of dx.

    Raises:
        ValueError: neither rstd nor eps.
    """
    return launch_backward(dy_RD, x_RD, gain_D, rstd_R, dresidual_RD, eps, absmax)


class RMSNorm(torch.autograd.Function):
    """``RMSNorm.apply(x, weight, eps)``: the kernels, joined to autograd; checks nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_RD = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y_RD, rstd_R = rms_norm_forward(x_RD, weight, eps)
        ctx.save_for_backward(x_RD, weight, rstd_R)
        return y_RD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RD, weight, rstd_R = ctx.saved_tensors
        dx_RD, dgain = rms_norm_backward(dy.reshape(x_RD.shape), x_RD, weight, rstd_R)
        return dx_RD.view(dy.shape), dgain, None


def check(x: Tensor, weight: Tensor, **others: Tensor) -> None:
    """Raises ValueError, one sentence, unless the kernels take x (..., D) and weight (D), and ``others`` are like x."""
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not match the last dimension of x {tuple(x.shape)}")
    for name, other in others.items():
        if other.shape != x.shape:
            raise ValueError(f"{name} {tuple(other.shape)} does not match x {tuple(x.shape)}")
    check_alike(x=x, weight=weight, **others)
    check_runnable(rms_norm_forward_kernel, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x (..., D), weight (D) -> (..., D) in x's dtype.

    Any strides; rows that are not contiguous cost a copy.

    Raises:
        ValueError: the shapes do not fit, the dtypes or devices differ, or the kernels do not take them.
    """
    check(x, weight)
    return RMSNorm.apply(x, weight, eps)


class AddRMSNorm(torch.autograd.Function):
    """``AddRMSNorm.apply(x, branch, weight, eps)``: the kernels, joined to autograd; checks nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows = math.prod(x.shape[:-1]), x.shape[-1]
        residual_RD, y_RD, rstd_R = add_rms_norm_forward(x.reshape(rows), branch.reshape(rows), weight, eps)
        ctx.save_for_backward(residual_RD, weight, rstd_R)
        ctx.set_materialize_grads(False)
        return residual_RD.view(x.shape), y_RD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dresidual: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dresidual, dresidual, None, None
        residual_RD, weight, rstd_R = ctx.saved_tensors
        dy_RD, dresidual_RD = (None if g is None else g.reshape(residual_RD.shape) for g in (dy, dresidual))
        dx_RD, dgain = rms_norm_backward(dy_RD, residual_RD, weight, rstd_R, dresidual_RD)
        dx = dx_RD.view(dy.shape)
        return dx, dx, dgain, None


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + branch, its RMSNorm): x and branch (..., D), weight (D) -> both (..., D) in x's dtype.

    Any strides; rows that are not contiguous cost a copy.

    Raises:
        ValueError: the shapes do not fit, the dtypes or devices differ, or the kernels do not take them.
    """
    check(x, weight, branch=branch)
    return AddRMSNorm.apply(x, branch, weight, eps)
