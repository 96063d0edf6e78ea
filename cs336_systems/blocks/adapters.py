"""Low-rank adapters beside the four matrices of a block (LoRA: Hu et al. 2021, arXiv 2106.09685).

    adapt(model, Lora(rank=16, alpha=32))            # written-out blocks; everything else is frozen

Of y = x W^T + s (x A^T) B^T, W (N, K) gets no gradient. With h = x A^T and dh = s dy B:

    dx = dy W + dh A        dA = dh^T x        dB = s dy^T h

Shape legend: x (R, K), y (R, N), A (r, K), B (N, r), and s = alpha / rank. A matrix of n parts (q, k, v: 3; gate, up:
2) has an A of n r rows.

h, r numbers a token, is computed again in backward, which reads x anyway. q, k and v have an A of their own each, one
after the other in one matrix, and so have gate and up; each B adds to its own columns. Parameters have peft's names
below the matrix they belong to (``attn.q_proj.lora_A.weight``), its shapes, and its initial values: A uniform within
1 / sqrt(K), B zero, with which a block computes what it computes without them, to the bit. Where the matrices are
quantized, adapters read the values that quantized products read, but multiply in the block's dtype.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.blocks.quantized import QuantizedProducts
from cs336_systems.blocks.weights import PARTS, merge_
from cs336_systems.config import Lora
from cs336_systems.model import TransformerLM


@dataclass(frozen=True)
class Adapter:
    """The adapter of a matrix with n parts, of rank r each."""

    a: Tensor
    """(n r, K)"""
    b: Tensor
    """(N, r)"""
    widths: tuple[int, ...]
    """Columns of y that each part has; N together."""
    scale: float

    def _parts(self, y_RN: Tensor, h_Rr: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(columns of y, columns of h, rows of B) of each part."""
        widths, rank = list(self.widths), self.b.shape[1]
        return list(zip(y_RN.split(widths, dim=1), h_Rr.split(rank, dim=1), self.b.split(widths), strict=True))

    def add_(self, y_RN: Tensor, x_RK: Tensor) -> None:
        """y += s (x A^T) B^T."""
        for y, h, b in self._parts(y_RN, x_RK @ self.a.T):
            y.addmm_(h, b.T, alpha=self.scale)

    def backward_(self, dx_RK: Tensor, dy_RN: Tensor) -> Tensor:
        """dx += dh A; returns dh (R, n r)."""
        dh_Rr = dx_RK.new_empty(dx_RK.shape[0], self.a.shape[0])
        for dy, dh, b in self._parts(dy_RN, dh_Rr):
            torch.addmm(dh, dy, b, beta=0, alpha=self.scale, out=dh)
        dx_RK.addmm_(dh_Rr, self.a)
        return dh_Rr

    def gradients_(
        self,
        weight_backward_: Callable[..., object],
        da: Tensor | None,
        db: Tensor | None,
        dy_RN: Tensor,
        x_RK: Tensor,
        dh_Rr: Tensor,
        accumulate: bool,
    ) -> None:
        """Write dA to ``da`` and dB to ``db``, or add; None skips one. ``weight_backward_`` is as in ``BlockOps``."""
        if da is not None:
            weight_backward_(da, dh_Rr, x_RK, accumulate)
        if db is not None:
            h_Rr = dh_Rr.new_empty(dh_Rr.shape).addmm_(x_RK, self.a.T, beta=0, alpha=self.scale)
            for (dy, h, _), gradient in zip(self._parts(dy_RN, h_Rr), db.split(list(self.widths)), strict=True):
                weight_backward_(gradient, dy, h, accumulate)


class _Factor(nn.Module):
    """A or B of an adapter: ``weight`` (d_out, d_in); zero, or uniform within 1 / sqrt(d_in)."""

    def __init__(self, d_out: int, d_in: int, like: Tensor, *, zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=like.device, dtype=like.dtype))
        if not like.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 0.0 if self.zero else 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)


def adapt(model: TransformerLM, lora: Lora) -> None:
    """Freeze the model and give its written-out blocks adapters; do so before anything wraps it.

    Raises:
        ValueError: a matrix has fewer rows or columns than the rank.
    """
    model.requires_grad_(False)
    model.not_saved = frozenset(name for name, _ in model.named_parameters())  # type: ignore[assignment]
    for block in model.layers:
        shapes = adapter_shapes({name: tuple(p.shape) for name, p in block.named_parameters()}, lora)
        for name, (d_out, d_in) in shapes.items():
            linear, factor, _ = name.rsplit(".", 2)
            weight = block.get_parameter(f"{linear}.weight")
            setattr(block.get_submodule(linear), factor, _Factor(d_out, d_in, weight, zero=factor == "lora_B"))
        if isinstance(block.products, QuantizedProducts):
            block.products.frozen = True
        block.adapter_scale = lora.scale  # type: ignore[assignment]
        merge_(block)


def adapter_shapes(weights: Mapping[str, tuple[int, ...]], lora: Lora) -> dict[str, tuple[int, int]]:
    """Names and shapes of the adapters' parameters, for those of a block's, or a model's, own.

    Raises:
        ValueError: a matrix has fewer rows or columns than the rank.
    """
    adapted = tuple(part for name in lora.on for part in PARTS[name])
    found: dict[str, tuple[int, int]] = {}
    for name, shape in weights.items():
        if not name.endswith(adapted):
            continue
        d_out, d_in = shape
        if lora.rank > min(shape):
            raise ValueError(f"a LoRA rank of {lora.rank} is larger than {name}, which is {d_out} x {d_in}")
        module = name.removesuffix(".weight")
        found |= {f"{module}.lora_A.weight": (lora.rank, d_in), f"{module}.lora_B.weight": (d_out, lora.rank)}
    return found
