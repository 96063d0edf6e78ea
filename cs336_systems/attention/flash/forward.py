"""FlashAttention-2, forward: o = softmax(scale q k^T) v and its log-sum-exp, without the score matrix.

Method (Dao 2023, algorithm 1). One program owns a tile of queries and loops over the keys, tile by tile. It keeps the
largest score so far, m, the sum of exp(score - m), l, and the unnormalised output, acc. A new tile S = q k^T gives

    m' = max(m, rowmax S);    P = exp(S - m');    l' = l exp(m - m') + rowsum P;    acc' = acc exp(m - m') + P v

and after the last tile o = acc / l and lse = m + log l. S and P are only in registers or shared memory.

Base 2: the hardware has exp2, so scale * log2(e) is one factor, applied together with the subtraction in one fused
multiply-add per score; m is kept in base 2, and lse is returned as a natural logarithm.

Order of work: causal programs stop at their diagonal; tiles above it are never loaded. The keys that every row of the
tile sees come first, in a loop without masks; a second loop processes the diagonal and the partial last tile. Programs
of one head have consecutive numbers, so that its keys stay in L2, and causal ones are numbered from the longest to the
shortest, so that the shortest start last. Each key/value head is shared by ``group`` consecutive query heads.

Precision: products accumulate in fp32; P is rounded to the inputs' dtype for P v; m, l, lse are fp32.

A row that sees no key (causal, more queries than keys) has o = 0 and lse = -inf.

Packed documents (``starts``): tiles of keys before a tile's first document are not loaded either, and the loop with
masks also takes those in which a document of the tile begins. (With a third loop ptxas serialises every wgmma, C7515.)

Limits: head dims 16 to 256; tiles are chosen for the shared memory of an H100 or H200 (227 KiB), and may not fit less.

Shape legend: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.flash.primitives import (
    LN_2,
    LOG2_E,
    document_keys,
    load_row_values,
    load_tile,
    own_tile,
    seen_keys,
    store_tile,
    visible,
)
from cs336_systems.attention.flash.tiles import input_precision, tile_for, with_short_rows
from cs336_systems.kernels.launching import ceil_div, launch, next_power_of_2


@triton.jit
def attend_keys(
    acc, row_max, row_sum, q_tile, k, v, starts, stride_k, stride_v, first_query, first_key, end_key, done_from,
    n_done, n_queries, n_keys, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update (acc, row_max, row_sum) by keys first_key to end_key; if packed and masked, without those already done."""
    for place in tl.range(first_key, end_key - n_done, BLOCK_K):
        start = place
        if MASKED and PACKED:
            start = tl.where(place < done_from, place, place + n_done)
        k_tile = load_tile(k, start, n_keys, stride_k, BLOCK_K, D, BLOCK_D, CHECK_ROWS=MASKED)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            queries = first_query + tl.arange(0, BLOCK_Q)
            keys = start + tl.arange(0, BLOCK_K)
            seen = visible(queries[:, None], keys[None, :], n_keys, n_queries, CAUSAL)
            if PACKED:
                first_seen = load_row_values(starts, first_query, n_queries, 0, BLOCK_Q, CHECK_ROWS=True)
                seen = seen & (keys[None, :] >= first_seen[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # -inf - -inf is NaN: a row that has seen nothing yet subtracts 0.
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(scores * scale_log2 - subtracted[:, None])
        rescale = tl.exp2(row_max - subtracted)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v_tile = load_tile(v, start, n_keys, stride_v, BLOCK_K, D, BLOCK_D, CHECK_ROWS=MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def flash_forward_kernel(
    q, k, v, o, lse, starts, stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh,
    stride_v, stride_ob, stride_oh, stride_o, n_heads, group, n_queries, n_keys, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o (B, H, Q, D) and lse (B, H, Q); one program per query tile of one head."""
    tile, batch_head, batch, head = own_tile(n_heads, n_queries, BLOCK_Q, CAUSAL)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + (head // group) * stride_kh
    v += batch * stride_vb + (head // group) * stride_vh
    o += batch * stride_ob + head * stride_oh
    lse += batch_head.to(tl.int64) * n_queries
    first_query = tile * BLOCK_Q
    unmasked_end, end = seen_keys(first_query, n_queries, n_keys, BLOCK_Q, BLOCK_K, CAUSAL)

    q_tile = load_tile(q, first_query, n_queries, stride_q, BLOCK_Q, D, BLOCK_D, CHECK_ROWS=True)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    first, unmasked, n_done = unmasked_end, 0, 0
    if PACKED:
        starts += batch * n_queries
        first, unmasked = document_keys(starts, first_query, n_queries, unmasked_end, BLOCK_Q, BLOCK_K)
        n_done = unmasked_end - unmasked
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q_tile, k, v, starts, stride_k, stride_v, first_query, unmasked, unmasked_end, 0, 0,
        n_queries, n_keys, scale_log2, D, BLOCK_Q, BLOCK_K, BLOCK_D, CAUSAL, False, PACKED, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = attend_keys(
        acc, row_max, row_sum, q_tile, k, v, starts, stride_k, stride_v, first_query, first, end, unmasked, n_done,
        n_queries, n_keys, scale_log2, D, BLOCK_Q, BLOCK_K, BLOCK_D, CAUSAL, True, PACKED, PRECISION,
    )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row without keys: acc is 0 and row_max is -inf, as required
    store_tile(o, acc / row_sum[:, None], first_query, n_queries, stride_o, BLOCK_Q, D, BLOCK_D)
    queries = first_query + tl.arange(0, BLOCK_Q)
    tl.store(lse + queries, row_max * LN_2 + tl.log(row_sum), mask=queries < n_queries)


def launch_forward(
    q_BHQD: Tensor, k_BKND: Tensor, v_BKND: Tensor, causal: bool, scale: float, starts_BQ: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o (B, H, Q, D) laid out like q, and lse (B, H, Q) in fp32."""
    q, k, v = (with_short_rows(x) for x in (q_BHQD, k_BKND, v_BKND))
    batch, n_heads, n_queries, d_head = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    o = torch.empty_like(q)
    lse = torch.empty(batch, n_heads, n_queries, dtype=torch.float32, device=q.device)
    if batch == 0:
        return o, lse
    tile = tile_for("forward", d_head, q.element_size())
    tensors = (q, k, v, o)
    grid = (ceil_div(n_queries, tile.block_q) * batch * n_heads,)
    launch(
        flash_forward_kernel,
        grid,
        *(*tensors, lse, lse if starts_BQ is None else starts_BQ),
        *(stride for x in tensors for stride in x.stride()[:3]),
        *(n_heads, n_heads // n_kv_heads, n_queries, n_keys, scale * LOG2_E.value),
        D=d_head,
        BLOCK_D=next_power_of_2(d_head),
        CAUSAL=causal,
        PACKED=starts_BQ is not None,
        PRECISION=input_precision(d_head),
        **tile.launch_options(),
    )
    return o, lse
