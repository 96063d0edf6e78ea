"""The operations that the model calls, as values.

``TransformerLM`` holds the parameters and the order of operations; what each operation *does* arrives as a
``ModelOps``. A fused kernel, a ranged softmax or another attention is then a value handed to the constructor
(``dataclasses.replace(REFERENCE_OPS, attention=...)``), and the model file never learns of it.

``REFERENCE_OPS`` are the formulas written for reading, in plain PyTorch. They follow the dtype of their inputs:
norms and rotations are computed in at least fp32 and return the input's dtype, so fp64 inputs stay fp64.

Shape legend: B batch, S sequence, D d_model, F d_ff, H query heads, K key/value heads, E d_head, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """``x`` in its own dtype or fp32, whichever is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x (..., d_in), weight (d_out, d_in), bias (d_out,)."""
    return F.linear(x, weight, bias)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight (V, D) for integer ids (...), giving (..., D)."""
    return F.embedding(token_ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, eq. 4)."""
    wide = widened(x)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms).to(x.dtype) * weight


def rotary(x_BHSE: Tensor, cos_SE2: Tensor, sin_SE2: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + E/2]) by their position's angle (Su et al. 2021, eq. 34, half-split layout).

    The half-split layout is the one Llama and Qwen checkpoints are stored in. ``cos`` and ``sin`` are (S, E/2).
    """
    first, second = x_BHSE.chunk(2, dim=-1)
    rotated = torch.cat((first * cos_SE2 - second * sin_SE2, second * cos_SE2 + first * sin_SE2), dim=-1)
    return rotated.to(x_BHSE.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise (Shazeer 2020, eq. 6)."""
    return F.silu(gate) * up


def attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, causal: bool, starts: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(E)) v with every score in memory; each key/value head serves H / K query heads.

    Queries and keys may differ in number: the causal mask is then aligned to the last key, so that the last query
    sees every key. A query sees no key before its document's first, which ``starts`` (B, S) says of documents in a row.

    Raises:
        ValueError: causal with more queries than keys, where the first queries would see nothing.
    """
    n_queries, n_keys = q_BHSE.shape[2], k_BKSE.shape[2]
    if causal and n_queries > n_keys:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {n_queries} queries, {n_keys} keys"
        )
    queries_per_kv_head = q_BHSE.shape[1] // k_BKSE.shape[1]
    k = repeat(k_BKSE, "b k s e -> b (k g) s e", g=queries_per_kv_head)
    v = repeat(v_BKSE, "b k s e -> b (k g) s e", g=queries_per_kv_head)
    scores = (q_BHSE * q_BHSE.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if causal:
        future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=scores.device).triu(n_keys - n_queries + 1)
        scores = scores.masked_fill(future, float("-inf"))
    if starts is not None:
        earlier = torch.arange(n_keys, device=scores.device) < starts[:, None, :, None]
        scores = scores.masked_fill(earlier, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood of targets under logits x W^T, in nats, at least fp32; targets of -100 do not count.

    x (..., D), weight (V, D), int64 targets (...) -> scalar.
    """
    return F.cross_entropy(widened(linear(x, weight)).flatten(0, -2), targets.flatten(), ignore_index=-100)


def stack(blocks: Sequence[Callable[..., Tensor]], x_BSD: Tensor, *where: Tensor) -> Tensor:
    """Run the blocks, (x, cos, sin[, starts]) -> x each, one after the other: (B, S, D) -> (B, S, D)."""
    for block in blocks:
        x_BSD = block(x_BSD, *where)
    return x_BSD


@dataclass(frozen=True)
class ModelOps:
    """One function per operation of the model; each documents its shapes at its reference above."""

    linear: Callable[..., Tensor] = linear
    embedding: Callable[..., Tensor] = embedding
    rms_norm: Callable[..., Tensor] = rms_norm
    rotary: Callable[..., Tensor] = rotary
    swiglu: Callable[..., Tensor] = swiglu
    attention: Callable[..., Tensor] = attention
    linear_cross_entropy: Callable[..., Tensor] = linear_cross_entropy
    stack: Callable[..., Tensor] = stack


REFERENCE_OPS = ModelOps()
