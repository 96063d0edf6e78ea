"""The residual add and the RMSNorm after it in one pass, for autograd; formula, method and limits: ``rms_norm.py``.

Forward reads x and branch and writes both results; backward reads the residual and both of their gradients, and writes
one gradient, which is that of x and of branch: four passes over (R, D) each, where separate operations take 5 and 6.

    residual, y = add_rms_norm(x, branch, weight, eps)
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.kernels.rms_norm import add_rms_norm_forward, check, rms_norm_backward


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
