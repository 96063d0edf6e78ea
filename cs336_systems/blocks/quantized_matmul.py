"""Multiplies two fp8 matrices: ``torch._scaled_mm`` on CUDA devices, emulated elsewhere.

The emulation multiplies the same quantized values and accumulates in fp32, so a recipe can be judged without a GPU. It
does not model how Hopper accumulates (measured by DeepSeek-V3, arXiv 2412.19437, and SageAttention2, arXiv 2411.10958):
32 products and the sum so far are aligned to their largest exponent and truncated to 13 fractional bits, and the new
sum is truncated, too. With fast accumulation the whole dot product is summed this way; without it, 128 products at a
time, whose sums are added in fp32.

A bias is added before the product is rounded, but after rounding with scales by block. A sum with an addend is rounded
once. On CUDA devices the product is also rounded before the sum if the addend is the output (``kernels/cublaslt.py``),
or with scales by row or block, because ``_scaled_mm`` takes no addend.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.costs.kept import SCALED_BLOCK
from cs336_systems.kernels.matmul import multiply_scaled_


@dataclass(frozen=True)
class Quantized:
    """A matrix (M, K): fp8 values and the scales by which to multiply them."""

    values: Tensor
    scale: Tensor
    """fp32: (), (M, 1), or (M, K / 128), rounded up."""
    dtype: torch.dtype
    """The matrix's dtype before it was quantized."""

    def __getitem__(self, rows: slice) -> "Quantized":
        return replace(self, values=self.values[rows], scale=self.scale[rows] if self.scale.dim() else self.scale)

    def empty(self, width: int) -> Tensor:
        """Memory for a matrix (M, width) of the original dtype."""
        return self.values.new_empty(len(self.values), width, dtype=self.dtype)


def multiply(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    by: str,
    fast: bool = False,
    addend: Tensor | None = None,
) -> None:
    """out = a b^T + bias + addend, for a (M, K), b (N, K), bias (N,) and addend (M, N).

    Args:
        by: the recipe's scaling: tensor, row or block.
        fast: whether tensor cores may accumulate the whole product in their registers.
        addend: may be ``out``.
    """
    (emulated if a.values.is_cpu else scaled_mm)(a, b, bias, fast, out, addend, by=by)


def scaled_mm(
    a: Quantized, b: Quantized, bias: Tensor | None, fast: bool, out: Tensor, addend: Tensor | None, *, by: str
) -> None:
    """``multiply`` by torch's product, which with scales by block accumulates in fp32 and takes no bias."""
    if by == "tensor" and bias is None:
        multiply_scaled_(out, a.values, b.values.T, (a.scale, b.scale), addend, fast=fast)
        return
    if addend is not None:
        product = torch.empty_like(out)
        scaled_mm(a, b, bias, fast, product, None, by=by)
        torch.add(addend, product, out=out)
        return
    scale_a, scale_b = a.scale, b.scale
    if by == "row":
        scale_b = scale_b.T
    if by == "block":  # along M and N first
        scale_a, scale_b = scale_a.T.contiguous().T, scale_b.T.contiguous()
    how: dict[str, Any] = {"out_dtype": a.dtype, "out": out}
    if by != "block":
        how |= {"bias": bias, "use_fast_accum": fast}
    torch._scaled_mm(a.values, b.values.T, scale_a, scale_b, **how)
    if bias is not None and by == "block":
        out.add_(bias)


def emulated(
    a: Quantized, b: Quantized, bias: Tensor | None, fast: bool, out: Tensor, addend: Tensor | None, *, by: str
) -> None:
    """``multiply`` in at least fp32; ``fast`` changes nothing."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if by == "block":
        product = (values_of_blocks(a, wide) @ values_of_blocks(b, wide).T).to(wide if bias is None else a.dtype)
    else:
        product = a.values.to(wide) @ b.values.to(wide).T * (a.scale.view(-1, 1) * b.scale.view(1, -1))
    if bias is not None:
        product += bias
    if addend is not None:
        product += addend
    out.copy_(product)


def values_of_blocks(x: Quantized, dtype: torch.dtype) -> Tensor:
    """Values times their block's scale."""
    return x.values.to(dtype) * spread(x.scale, x.values.shape[1])


def spread(scale: Tensor, width: int) -> Tensor:
    """Scales by block, (M, K / 128) rounded up, repeated for each number: (M, K) with K = ``width``."""
    return scale.repeat_interleave(SCALED_BLOCK, dim=1)[:, :width]
