"""FlashAttention-2 in plain PyTorch (Dao 2023, algorithms 1 and 2): readable, and for any device.

Forward loops, for each tile of queries, over the tiles of keys, and keeps three running values per row: the largest
score m, the sum l of exp(score - m), and the unnormalised output. When a later tile raises m, both sums are rescaled by
exp(m_old - m_new). At the end o = output / l, and only lse = m + log(l) is saved for backward.

Backward recomputes each tile's probabilities as p = exp(score - lse) and needs no second softmax: with
delta = rowsum(do * o), the score gradient is ds = p * (do v^T - delta). It loops, for each tile of keys, over the tiles
of queries; dk and dv accumulate per tile, dq in memory.

Causal tiles above the diagonal are skipped, and only tiles that the diagonal crosses are masked. Memory beyond inputs
and outputs is a few tiles of (batch, heads, QUERY_TILE, KEY_TILE) scores and backward's dq in at least fp32, so it
grows with n_queries, not with n_queries n_keys. All arithmetic is in at least fp32, also under autocast, and results
are rounded once. FLOPs: forward 4 batch heads n_queries n_keys d_head (about half if causal); backward 2.5 times that,
as it recomputes the scores.

    o = TiledFlashAttention.apply(q, k, v, is_causal, scale)     # gradients to q, k and v; once differentiable
    o, lse = tiled_forward(q, k, v, causal=True)                 # no gradients

Shape legend: B batch, K key/value heads, G query heads of each of them, Q queries (of a tile), S keys (of a tile),
E d_head. Tiles of k and v have G = 1 and are broadcast.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention.shapes import AttentionShape, accumulator_dtype, validate

# Rows of a tile. Forward | backward of (1, 8, 2048, 64) causal fp32 on two CPU cores, ms: 32 x 32 173 | 450,
# 64 x 64 81 | 207, 128 x 128 52 | 119, 256 x 256 63 | 137, 512 x 512 60 | 129. Smaller tiles are bound by the overhead
# of 15 calls per tile, larger ones compute more masked scores at the diagonal.
QUERY_TILE = 128
KEY_TILE = 128


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 1; shapes and ValueErrors as in ``shapes.validate``.

    Returns:
        o like q, and lse (batch[, heads], n_queries), natural logarithm, in at least fp32. A query that sees no key has
        o = 0 and lse = -inf.
    """
    shape = validate(q, k, v, scale=scale)
    scale = shape.default_scale if scale is None else scale
    q_BKGQE, k_BKSE, v_BKSE = _grouped(q, shape), _grouped(k, shape), _grouped(v, shape)
    o_BKGQE = torch.empty_like(q_BKGQE, memory_format=torch.contiguous_format)
    lse_BKGQ = q.new_empty(q_BKGQE.shape[:-1], dtype=accumulator_dtype(q.dtype))
    with torch.autocast(q.device.type, enabled=False):
        for queries in _tiles(shape.n_queries, QUERY_TILE):
            q_tile = _widened(q_BKGQE[..., queries, :]) * scale
            row_max = lse_BKGQ.new_full(q_tile.shape[:-1], float("-inf"))
            row_sum = torch.zeros_like(row_max)
            output = torch.zeros_like(q_tile)
            for keys in _tiles(shape.n_keys, KEY_TILE):
                if causal and _all_hidden(queries, keys, shape):
                    break
                scores = _scores(q_tile, _widened(k_BKSE[..., keys, :]), queries, keys, shape, causal)
                new_max = torch.maximum(row_max, scores.amax(dim=-1))
                # A row that has seen no key yet still has m = -inf, and -inf - -inf is NaN.
                shift = new_max.masked_fill(new_max == float("-inf"), 0.0)
                p = torch.exp(scores - shift[..., None])
                rescale = torch.exp(row_max - shift)
                row_sum = rescale * row_sum + p.sum(dim=-1)
                output = rescale[..., None] * output + p @ _widened(v_BKSE[..., keys, :])
                row_max = new_max
            # l >= 1 if the row has seen a key (the largest score adds exp(0)), else 0.
            o_BKGQE[..., queries, :] = output / row_sum.clamp_min(1.0)[..., None]
            lse_BKGQ[..., queries] = row_max + row_sum.log()
    return o_BKGQE.view(q.shape), lse_BKGQ.view(q.shape[:-1])


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: (dq, dk, dv) like q, k and v."""
    shape = AttentionShape.of(q, k)
    scale = shape.default_scale if scale is None else scale
    q_BKGQE, k_BKSE, v_BKSE = _grouped(q, shape), _grouped(k, shape), _grouped(v, shape)
    do_BKGQE = _grouped(do, shape)
    delta_BKGQ = (_widened(do_BKGQE) * _widened(_grouped(o, shape))).sum(dim=-1)
    # A query that sees no key has lse = -inf; +inf makes its p = exp(score - lse) zero instead of NaN.
    lse_BKGQ = _grouped(lse.masked_fill(lse == float("-inf"), float("inf"))[..., None], shape).squeeze(-1)
    dq_BKGQE = q.new_zeros(q_BKGQE.shape, dtype=accumulator_dtype(q.dtype))
    dk_BKSE, dv_BKSE = k.new_empty(k_BKSE.shape), v.new_empty(v_BKSE.shape)
    with torch.autocast(q.device.type, enabled=False):
        for keys in _tiles(shape.n_keys, KEY_TILE):
            k_tile, v_tile = _widened(k_BKSE[..., keys, :]), _widened(v_BKSE[..., keys, :])
            dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
            for queries in _tiles(shape.n_queries, QUERY_TILE):
                if causal and _all_hidden(queries, keys, shape):
                    continue
                q_tile = _widened(q_BKGQE[..., queries, :]) * scale
                do_tile = _widened(do_BKGQE[..., queries, :])
                scores = _scores(q_tile, k_tile, queries, keys, shape, causal)
                p = torch.exp(scores - lse_BKGQ[..., queries, None])
                dv_tile += _sum_over_group(p.mT @ do_tile)
                ds = p * (do_tile @ v_tile.mT - delta_BKGQ[..., queries, None])
                dq_BKGQE[..., queries, :] += scale * (ds @ k_tile)
                dk_tile += _sum_over_group(ds.mT @ q_tile)
            dk_BKSE[..., keys, :], dv_BKSE[..., keys, :] = dk_tile, dv_tile
    return dq_BKGQE.to(q.dtype).view(q.shape), dk_BKSE.view(k.shape), dv_BKSE.view(v.shape)


class TiledFlashAttention(torch.autograd.Function):
    """``apply(q, k, v, is_causal=False, scale=None)`` -> o like q.

    Saves q, k, v, o and lse; lse is the one saved tensor of shape (batch[, heads], n_queries).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        o, lse = tiled_forward(q, k, v, causal=is_causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        return *tiled_backward(q, k, v, o, lse, do, causal=ctx.is_causal, scale=ctx.scale), None, None


def _tiles(length: int, tile: int) -> Iterator[slice]:
    """Slices of at most ``tile`` that cover 0 to ``length``."""
    return (slice(start, min(start + tile, length)) for start in range(0, length, tile))


def _all_hidden(queries: slice, keys: slice, shape: AttentionShape) -> bool:
    """Whether the tile is above the diagonal: its last query does not see its first key."""
    return keys.start > queries.stop - 1 + shape.offset


def _all_visible(queries: slice, keys: slice, shape: AttentionShape) -> bool:
    """Whether the tile needs no mask: its first query sees its last key."""
    return keys.stop - 1 <= queries.start + shape.offset


def _scores(q_tile: Tensor, k_tile: Tensor, queries: slice, keys: slice, shape: AttentionShape, causal: bool) -> Tensor:
    """(B, K, G, Q, S) scores of a scaled query tile, -inf where the causal mask hides the key."""
    scores = q_tile @ k_tile.mT
    if causal and not _all_visible(queries, keys, shape):
        position = torch.arange(queries.start, queries.stop, device=scores.device) + shape.offset
        key = torch.arange(keys.start, keys.stop, device=scores.device)
        scores = scores.masked_fill(key > position[:, None], float("-inf"))
    return scores


def _grouped(x: Tensor, shape: AttentionShape) -> Tensor:
    """(batch[, heads], length, width) as the view (B, K, G, length, width); G is 1 for keys and values."""
    if not shape.four_d:
        return x[:, None, None]
    return x.unflatten(1, (shape.kv_heads, -1))


def _sum_over_group(gradient: Tensor) -> Tensor:
    """Sum a key or value tile's gradient over the query heads that share it: (B, K, G, S, E) -> (B, K, 1, S, E)."""
    return gradient.sum(dim=2, keepdim=True)


def _widened(x: Tensor) -> Tensor:
    return x.to(accumulator_dtype(x.dtype))
