"""Attention with all scores in memory, written to be read: the oracle for all other implementations.

    scores = scale q k^T                       (n_queries, n_keys)
    lse    = log sum_j exp(scores_j)           over the keys that the query sees
    o      = exp(scores - lse) v

A causal query i sees the keys j <= i + n_keys - n_queries: the mask is aligned to the last key. With more queries than
keys the first queries see nothing: their o is 0, their lse is -inf, and every gradient through them is 0.

The matmuls run in the inputs' dtype and the softmax in at least fp32, as in a model written in plain PyTorch. So with
fp64 inputs this is the oracle, and with inputs of another dtype its error against fp64 is the error budget that tests
give to fast code. Cost: 4 batch heads n_queries n_keys d_head FLOPs in forward, and three score matrices saved for
backward (two of them in at least fp32), which the other implementations avoid. fp16 scores beyond 65,504 overflow.
"""

import torch
from torch import Tensor

from cs336_systems.attention.shapes import AttentionShape, accumulator_dtype, check_starts, validate


def oracle_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; shapes and ValueErrors as in ``shapes.validate``.

    Args:
        scale: multiplies the scores; 1 / sqrt(d_head) if None.
        starts: as for ``dispatch.attention``.

    Returns:
        o like q, and lse (batch[, heads], n_queries), natural logarithm, in at least fp32.
    """
    shape = validate(q, k, v, scale=scale)
    visible = causal_mask(shape, q.device) if causal else None
    if starts is not None:
        check_starts(shape, causal, starts)  # raises unless causal
        assert visible is not None
        own = torch.arange(shape.n_keys, device=q.device) >= starts[..., None]
        visible = visible & (own[:, None] if shape.four_d else own)
    scores = scaled_scores(q, k, shape, scale)
    return attend(scores, visible, v, shape)


def causal_mask(shape: AttentionShape, device: torch.device) -> Tensor:
    """(n_queries, n_keys), True where a query sees a key."""
    return torch.ones(shape.n_queries, shape.n_keys, dtype=torch.bool, device=device).tril(shape.offset)


def scaled_scores(q: Tensor, k: Tensor, shape: AttentionShape, scale: float | None) -> Tensor:
    """scale q k^T (batch[, heads], n_queries, n_keys): multiplied in the dtype of q, returned in at least fp32."""
    q = q * (shape.default_scale if scale is None else scale)
    scores = q @ for_each_query_head(k, shape).mT
    return scores.to(accumulator_dtype(scores.dtype))


def attend(scores: Tensor, visible: Tensor | None, v: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """(o, lse) of scores (..., n_queries, n_keys); ``visible`` (broadcastable) masks keys, None means all are visible.

    A row without a visible key would be softmax(-inf, ..., -inf) = NaN, in forward and backward. Its scores are left
    unmasked instead, and its results are overwritten, so that no gradient flows back through it.
    """
    if visible is None:
        probabilities, lse = torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)
    else:
        blind = ~visible.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~(visible | blind), float("-inf"))
        probabilities = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
        lse = torch.logsumexp(scores, dim=-1).masked_fill(blind.squeeze(-1), float("-inf"))
    return probabilities.to(v.dtype) @ for_each_query_head(v, shape), lse


def for_each_query_head(x: Tensor, shape: AttentionShape) -> Tensor:
    """Keys or values with each head repeated for the query heads that share it."""
    return x.repeat_interleave(shape.group, dim=1) if shape.group > 1 else x
