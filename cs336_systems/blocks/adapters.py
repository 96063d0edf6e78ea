"""Low-rank adapters beside the four matrices of a block (LoRA: Hu et al. 2021, arXiv 2106.09685).

    adapt(model, Lora(rank=16, alpha=32))            # written-out blocks; everything else is frozen

y = x W^T + h B^T with h = s x A^T. W (N, K) gets no gradient. With dh = s dy B:

    dx = dy W + dh A        dA = dh^T x        dB = dy^T h

Shape legend: x (R, K), y (R, N), A (r, K), B (N, r), and s = alpha / rank. A matrix of n parts (q, k, v: 3; gate, up:
2) has an A of its own for each part, stacked in one matrix of n r rows; each part's B adds to that part's columns.

h has r numbers a token and is kept for backward at every level: 14 r bytes a token and block in bf16 if all matrices
have adapters. Parameters have peft's names (``attn.q_proj.lora_A.weight``), shapes and initial values: A is uniform
within 1 / sqrt(K) and B is zero, so at first a block gives the same bits as without adapters. Beside quantized
matrices, adapters read the quantized values but multiply in the block's dtype.

These products are small and would take longer than their FLOPs suggest (``kernels/lora.py``). With fused kernels a
block has four launches for h, three that add to y, four for dh, three that add to dx and four for gradients. The two
remaining additions are fused: gate | up's into its product, down's addition to dx into SwiGLU's backward.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.quantized import QuantizedProducts
from cs336_systems.blocks.saved import low_rank_name
from cs336_systems.blocks.weights import PARTS, merge_
from cs336_systems.config import Lora
from cs336_systems.kernels.lora_reference import LowRank, Scaled
from cs336_systems.model import TransformerLM


@dataclass(frozen=True)
class Adapter:
    """The adapter of a matrix with n parts, each of rank r; ``BlockOps.lora_gradients_`` gives its gradients."""

    a: Tensor
    """(n r, K)"""
    b: Tensor
    """(N, r)"""
    widths: tuple[int, ...]
    """Columns of y in each part; their sum is N."""
    scale: float

    def forward(self, ops: BlockOps, x_RK: Scaled) -> Tensor:
        """h (R, n r)."""
        return ops.lora_shrink(x_RK, self.a.T, (self.a.shape[1],), self.scale)

    def addition(self, h_Rr: Tensor) -> LowRank:
        """The adapter's term of y."""
        return LowRank(h_Rr, self.b, self.widths)

    def backward(self, ops: BlockOps, dy_RN: Scaled) -> LowRank:
        """The adapter's term of dx; its ``h`` is dh (R, n r)."""
        dh_Rr = ops.lora_shrink(dy_RN, self.b, self.widths, self.scale)
        return LowRank(dh_Rr, self.a.T, (self.a.shape[1],))


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
    """Freeze the model and add adapters to its written-out blocks; call this before wrapping the model.

    Raises:
        ValueError: a matrix has fewer rows or columns than the rank.
    """
    model.requires_grad_(False)
    model.not_saved = frozenset(name for name, _ in model.named_parameters())  # type: ignore[assignment]
    for block in model.layers:
        for name, (d_out, d_in) in adapter_shapes(block, lora).items():
            linear, factor, _ = name.rsplit(".", 2)
            weight = block.get_parameter(f"{linear}.weight")
            setattr(block.get_submodule(linear), factor, _Factor(d_out, d_in, weight, zero=factor == "lora_B"))
        if isinstance(block.products, QuantizedProducts):
            block.products.frozen = True
        block.adapter_scale = lora.scale  # type: ignore[assignment]
        kept: Any = block.kept
        block.kept = (*kept, *map(low_rank_name, lora.on))  # type: ignore[assignment]
        merge_(block)


def adapter_shapes(model: nn.Module, lora: Lora) -> dict[str, tuple[int, int]]:
    """Names and shapes of the adapters' parameters of a block or a model.

    Raises:
        ValueError: a matrix has fewer rows or columns than the rank.
    """
    adapted = tuple(part for name in lora.on for part in PARTS[name])
    found: dict[str, tuple[int, int]] = {}
    for name, weight in model.named_parameters():
        if not name.endswith(adapted):
            continue
        d_out, d_in = weight.shape
        if lora.rank > min(d_out, d_in):
            raise ValueError(f"a LoRA rank of {lora.rank} is larger than {name}, which is {d_out} x {d_in}")
        module = name.removesuffix(".weight")
        found |= {f"{module}.lora_A.weight": (lora.rank, d_in), f"{module}.lora_B.weight": (d_out, lora.rank)}
    return found
