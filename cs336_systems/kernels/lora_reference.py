"""The formulas of low-rank adapters (LoRA) in plain PyTorch; the kernels are in ``lora.py``.

For y = x W^T + h B^T with h = s x A^T, where A and B are trained:

    shrink              h = s x A^T         dh = s dy B
    expand_             y += h B^T          dx += dh A
    factor_gradients_   dA = dh^T x         dB = dy^T h

A matrix has n parts (q, k, v: 3; gate, up: 2), whose columns of y are consecutive. Each part has its own A and B of
rank r: h (R, n r) has the columns of each part's h, and columns of part i of y get h_i B_i^T.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Scaled(NamedTuple):
    """A matrix in the dtype of the factors, or a quantized one: fp8 values with one scale for all."""

    values: Tensor
    scale: Tensor | None = None
    """fp32, one element"""

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrix in this dtype."""
        return self.values if self.scale is None else self.values.to(dtype).mul_(self.scale)


class LowRank(NamedTuple):
    """A low-rank matrix (R, N), to be added to another: part i of its columns is h_i F_i^T."""

    h: Tensor
    """(R, n r)"""
    factor: Tensor
    """F (N, r), of any strides"""
    widths: tuple[int, ...]
    """Columns of each of the n parts, at most three; N together."""


def shrink(x_RN: Scaled, factor_Nr: Tensor, widths: Sequence[int], scale: float) -> Tensor:
    """scale x_i F_i for each part of the columns of x (R, N) and of the rows of F (N, r): (R, n r)."""
    rank, whole = factor_Nr.shape[1], x_RN.to(factor_Nr.dtype)
    h = whole.new_empty(len(whole), len(widths) * rank)
    parts = whole.split(list(widths), dim=1), factor_Nr.split(list(widths)), h.split(rank, dim=1)
    for x, factor, out in zip(*parts, strict=True):
        torch.addmm(out, x, factor, beta=0, alpha=scale, out=out)
    return h


def expand_(y_RN: Tensor, low: LowRank) -> None:
    """y += low."""
    rank, widths = low.factor.shape[1], list(low.widths)
    parts = y_RN.split(widths, dim=1), low.h.split(rank, dim=1), low.factor.split(widths)
    for y, h, factor in zip(*parts, strict=True):
        y.addmm_(h, factor.T)


def factor_gradients_(
    da: Tensor | None,
    db: Tensor | None,
    x_RK: Scaled,
    dy_RN: Scaled,
    h_Rr: Tensor,
    dh_Rr: Tensor,
    widths: Sequence[int],
    accumulate: bool,
) -> None:
    """Write the gradient of A to ``da`` (n r, K) and that of B to ``db`` (N, r), or add; None skips one."""
    beta = int(accumulate)
    if da is not None:
        da.addmm_(dh_Rr.T, x_RK.to(da.dtype), beta=beta)
    if db is not None:
        dy = dy_RN.to(db.dtype)
        parts = db.split(list(widths)), dy.split(list(widths), dim=1), h_Rr.split(db.shape[1], dim=1)
        for gradient, dy, h in zip(*parts, strict=True):
            gradient.addmm_(dy.T, h, beta=beta)
