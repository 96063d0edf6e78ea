"""Parameters and their initialisation: Linear, Embedding, RMSNorm, RotaryEmbedding, SwiGLU.

Each layer owns tensors and a ``reset_parameters``; the arithmetic comes from the ``ModelOps`` it was given. Built on
``device="meta"`` a layer allocates nothing; after ``to_empty`` the same ``reset_parameters`` fills it, so that a model
too large for one device is never whole anywhere.

Initialisation is the handout's: truncated normal at three standard deviations, variance 2 / (d_in + d_out) for
matrices (Glorot & Bengio 2010) and 1 for embeddings; gains start at one and biases at zero.
"""

import math
from collections.abc import Callable
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from cs336_systems.config import ModelConfig
from cs336_systems.model.ops import ModelOps


class Placement(TypedDict, total=False):
    """Where a layer's tensors are made, and in which dtype; torch's defaults where it does not say."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def _truncated_normal_(tensor: Tensor, std: float) -> None:
    nn.init.trunc_normal_(tensor, mean=0.0, std=std, a=-3 * std, b=3 * std)


class Linear(nn.Module):
    """x (..., d_in) -> (..., d_out); ``weight`` is (d_out, d_in), ``bias`` (d_out,) or None."""

    def __init__(
        self, d_in: int, d_out: int, ops: ModelOps, *, bias: bool = False, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(d_out, d_in, **placement))
        self.bias = nn.Parameter(torch.empty(d_out, **placement)) if bias else None

    def reset_parameters(self) -> None:
        d_out, d_in = self.weight.shape
        _truncated_normal_(self.weight, std=math.sqrt(2 / (d_in + d_out)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Head(Linear):
    """x (..., d_model) -> logits (..., vocab_size); given targets, their loss under those logits."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(x) if targets is None else self.ops.linear_cross_entropy(x, self.weight, targets)


class Embedding(nn.Module):
    """Integer ids (...) -> (..., d_model); ``weight`` is (vocab_size, d_model)."""

    def __init__(self, vocab_size: int, d_model: int, ops: ModelOps, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, **placement))

    def reset_parameters(self) -> None:
        _truncated_normal_(self.weight, std=1.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.ops.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension with a learned gain ``weight`` (d_model,)."""

    def __init__(self, d_model: int, eps: float, ops: ModelOps, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, **placement))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle in radians that one position adds to each pair of a head: (d_head / 2,), fp64, on the CPU.

    theta^(-2i / d_head), then Llama-3.1's rescaling where the config asks for it (see ``RopeScaling``).
    """
    exponents = torch.arange(0, config.d_head, 2, dtype=torch.float64, device="cpu") / config.d_head
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for every position: two buffers (context_length, d_head / 2), never saved with weights.

    They are kept in at least fp32 whatever the model's dtype: bf16 holds eight bits, too few for an angle.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config = config
        dtype = torch.promote_types(placement.get("dtype") or torch.get_default_dtype(), torch.float32)
        for name in ("cos", "sin"):
            table = torch.empty(config.context_length, config.d_head // 2, device=placement.get("device"), dtype=dtype)
            self.register_buffer(name, table, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """``nn.Module._apply``, which ``to`` calls: a change of dtype computes the tables anew."""
        dtype_before = self.cos.dtype
        super()._apply(fn, recurse)
        if self.cos.dtype != dtype_before:
            table_dtype = torch.promote_types(self.cos.dtype, torch.float32)
            self.cos, self.sin = (torch.empty_like(table, dtype=table_dtype) for table in (self.cos, self.sin))
            self.reset_parameters()
        return self

    def reset_parameters(self) -> None:
        positions = torch.arange(self.config.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, rotary_frequencies(self.config))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, n_positions: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the first ``n_positions`` positions, each (n_positions, d_head / 2).

        Raises:
            ValueError: more positions than the tables cover.
        """
        if n_positions > self.config.context_length:
            raise ValueError(
                f"sequence of {n_positions} tokens is beyond the model's context length {self.config.context_length}"
            )
        return self.cos[:n_positions], self.sin[:n_positions]


class SwiGLU(nn.Module):
    """Gated feed-forward w2(silu(w1 x) * w3 x): (..., d_model) -> (..., d_model) through width d_ff."""

    def __init__(self, d_model: int, d_ff: int, ops: ModelOps, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.ops = ops
        self.w1 = Linear(d_model, d_ff, ops, **placement)
        self.w2 = Linear(d_ff, d_model, ops, **placement)
        self.w3 = Linear(d_model, d_ff, ops, **placement)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.ops.swiglu(self.w1(x), self.w3(x)))
