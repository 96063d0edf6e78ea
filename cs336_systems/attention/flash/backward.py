"""FlashAttention-2, backward: dq, dk and dv from q, k, v, o, do and the log-sum-exp.

Method (Dao 2023, algorithm 2, split in two). With P = exp(S - lse), recomputed tile by tile, and S = scale q k^T,

    dv = P^T do;    dP = do v^T;    delta = rowsum(o * do);    dS = P * (dP - delta);
    dq = scale dS k;    dk = scale dS^T q.

Three kernels:

* preprocess (in its own file): one pass over o and do computes delta, and converts lse to base 2 once for all loops.
* dk and dv: one program per tile of keys of one key/value head. It loops over the queries that see its keys, in every
  query head of its group, so that grouped heads are summed in registers. It computes the transposes, S^T = k q^T and
  dP^T = v do^T, directly, so that they stay in registers as left operands of the next matmuls. (Transposing a matmul's
  result instead gives wrong gradients on Hopper with 3.4 <= Triton < 3.7.1.)
* dq: one program per tile of queries, looping over the keys, as in the forward pass.

Why separate kernels for dk, dv and dq: S and dP are computed twice, seven matmuls instead of five, so the speed is at
most 5/7 of that of one kernel in which many programs add to dq. In exchange, no two programs write the same element:
results are bit-identical in every run, with no fp32 buffer for dq, and no zeroing or rounding pass.

Masks: only a causal diagonal masks scores in the dk and dv kernel. Queries past the end, and queries that see no key,
get lse = +inf, so P = exp2(S - inf) is 0 there; keys past the end produce rows that are not stored.

Registers limit the tiles. In the dk and dv kernel, delta varies along a transposed tile's columns, so each thread would
hold 16 of its values through the matmul; instead, dP^T accumulates onto -delta, before S^T is computed. Compiled for
sm_90 (d64, 64 x 64, 2 stages), this takes 212 registers, and 242 if dP^T is computed after P^T do. Both loops have the
same pipelining: with num_stages=1 on the masked one, ptxas serialises every wgmma of the kernel (C7515).

Precision: P and dS are rounded to the inputs' dtype for their products; all sums are fp32.

Shape legend: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.flash.preprocess import launch_preprocess
from cs336_systems.attention.flash.primitives import (
    LOG2_E,
    document_keys,
    load_row_values,
    load_tile,
    own_tile,
    seen_keys,
    store_tile,
    visible,
)
from cs336_systems.attention.flash.tiles import input_precision, tile_for, with_short_rows, writable
from cs336_systems.attention.shapes import ends_of
from cs336_systems.kernels.launching import ceil_div, launch, next_power_of_2


@triton.jit
def add_query_tile(
    dk, dv, k_tile, v_tile, ends, q, do, lse_log2, delta, stride_q, stride_do, first_query, first_key, n_queries,
    n_keys, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one query tile's share to dk (unscaled) and dv of one key tile."""
    queries = first_query + tl.arange(0, BLOCK_Q)
    q_tile = load_tile(q, first_query, n_queries, stride_q, BLOCK_Q, D, BLOCK_D, CHECK_ROWS=MASKED)
    do_tile = load_tile(do, first_query, n_queries, stride_do, BLOCK_Q, D, BLOCK_D, CHECK_ROWS=MASKED)
    lse_tile = load_row_values(lse_log2, first_query, n_queries, float("inf"), BLOCK_Q, CHECK_ROWS=MASKED)
    delta_tile = load_row_values(delta, first_query, n_queries, 0.0, BLOCK_Q, CHECK_ROWS=MASKED)
    # tl.dot starts from -delta, so that what arrives is dP - delta.
    minus_delta = tl.broadcast_to(-delta_tile[None, :], (BLOCK_K, BLOCK_Q))
    dp_minus_delta_t = tl.dot(v_tile, tl.trans(do_tile), minus_delta, input_precision=PRECISION)
    scores_t = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    p_t = tl.exp2(scores_t * scale_log2 - lse_tile[None, :])
    if MASKED and CAUSAL:
        keys = first_key + tl.arange(0, BLOCK_K)
        p_t = tl.where(visible(queries[None, :], keys[:, None], n_keys, n_queries, CAUSAL), p_t, 0.0)
        if PACKED:
            p_t = tl.where(queries[None, :] < ends[:, None], p_t, 0.0)
    dv = tl.dot(p_t.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
    ds_t = p_t * dp_minus_delta_t
    dk = tl.dot(ds_t.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def flash_dkdv_kernel(
    q, k, v, do, lse_log2, delta, ends, dk, dv, stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k,
    stride_vb, stride_vh, stride_v, stride_dob, stride_doh, stride_do, stride_dkb, stride_dkh, stride_dk,
    stride_dvb, stride_dvh, stride_dv, n_kv_heads, group, n_queries, n_keys, scale, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (B, K, N, D); one program per key tile. Causal: the first tiles are the longest, and start first."""
    n_tiles = tl.cdiv(n_keys, BLOCK_K)
    first_key = tl.program_id(0) % n_tiles * BLOCK_K
    batch_head = tl.program_id(0) // n_tiles
    batch = (batch_head // n_kv_heads).to(tl.int64)
    kv_head = (batch_head % n_kv_heads).to(tl.int64)
    k += batch * stride_kb + kv_head * stride_kh
    v += batch * stride_vb + kv_head * stride_vh

    # Query tiles: those from ``first`` cross the diagonal, from ``full`` on all rows see all keys, and the one from
    # ``full_end`` on, if any, is partial.
    total = tl.cdiv(n_queries, BLOCK_Q)
    if CAUSAL:
        shift = n_keys - n_queries
        first = tl.maximum(first_key - shift, 0) // BLOCK_Q
        full = tl.minimum(tl.cdiv(tl.maximum(first_key + BLOCK_K - 1 - shift, 0), BLOCK_Q), total)
    else:
        first = 0
        full = 0
    key_ends = 0
    if PACKED:  # each key is seen until its document ends
        ends += batch * n_keys
        key_ends = load_row_values(ends, first_key, n_keys, 0, BLOCK_K, CHECK_ROWS=True)
        last_end = tl.load(ends + tl.minimum(first_key + BLOCK_K, n_keys) - 1)
        total = tl.cdiv(last_end, BLOCK_Q)
        full_end = tl.maximum(full, tl.load(ends + first_key) // BLOCK_Q)
    else:
        full_end = tl.maximum(full, n_queries // BLOCK_Q)
    n_diagonal = full - first
    n_masked = n_diagonal + total - full_end

    k_tile = load_tile(k, first_key, n_keys, stride_k, BLOCK_K, D, BLOCK_D, CHECK_ROWS=True)
    v_tile = load_tile(v, first_key, n_keys, stride_v, BLOCK_K, D, BLOCK_D, CHECK_ROWS=True)
    dk_sum = tl.zeros((BLOCK_K, BLOCK_D), dtype=tl.float32)
    dv_sum = tl.zeros((BLOCK_K, BLOCK_D), dtype=tl.float32)
    for member in range(group):
        head = kv_head * group + member
        q_head = q + batch * stride_qb + head * stride_qh
        do_head = do + batch * stride_dob + head * stride_doh
        row_offset = (batch * n_kv_heads * group + head) * n_queries
        for i in tl.range(0, n_masked):
            first_query = tl.where(i < n_diagonal, first + i, full_end + i - n_diagonal) * BLOCK_Q
            dk_sum, dv_sum = add_query_tile(
                dk_sum, dv_sum, k_tile, v_tile, key_ends, q_head, do_head, lse_log2 + row_offset, delta + row_offset,
                stride_q, stride_do, first_query, first_key, n_queries, n_keys, scale_log2,
                D, BLOCK_Q, BLOCK_K, BLOCK_D, CAUSAL, True, PACKED, PRECISION,
            )  # fmt: skip
        for first_query in tl.range(full * BLOCK_Q, full_end * BLOCK_Q, BLOCK_Q):
            dk_sum, dv_sum = add_query_tile(
                dk_sum, dv_sum, k_tile, v_tile, key_ends, q_head, do_head, lse_log2 + row_offset, delta + row_offset,
                stride_q, stride_do, first_query, first_key, n_queries, n_keys, scale_log2,
                D, BLOCK_Q, BLOCK_K, BLOCK_D, CAUSAL, False, PACKED, PRECISION,
            )  # fmt: skip
    dk += batch * stride_dkb + kv_head * stride_dkh
    dv += batch * stride_dvb + kv_head * stride_dvh
    store_tile(dk, dk_sum * scale, first_key, n_keys, stride_dk, BLOCK_K, D, BLOCK_D)
    store_tile(dv, dv_sum, first_key, n_keys, stride_dv, BLOCK_K, D, BLOCK_D)


@triton.jit
def add_keys(
    dq, q_tile, do_tile, lse_tile, delta_tile, k, v, starts, stride_k, stride_v, first_query, first_key, end_key,
    done_from, n_done, n_queries, n_keys, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of the keys that ``forward.attend_keys`` would take to dq (unscaled) of one query tile."""
    for place in tl.range(first_key, end_key - n_done, BLOCK_K):
        start = place
        if MASKED and PACKED:
            start = tl.where(place < done_from, place, place + n_done)
        k_tile = load_tile(k, start, n_keys, stride_k, BLOCK_K, D, BLOCK_D, CHECK_ROWS=MASKED)
        v_tile = load_tile(v, start, n_keys, stride_v, BLOCK_K, D, BLOCK_D, CHECK_ROWS=MASKED)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_tile[:, None])
        if MASKED:
            queries = first_query + tl.arange(0, BLOCK_Q)
            keys = start + tl.arange(0, BLOCK_K)
            p = tl.where(visible(queries[:, None], keys[None, :], n_keys, n_queries, CAUSAL), p, 0.0)
            if PACKED:
                first_seen = load_row_values(starts, first_query, n_queries, 0, BLOCK_Q, CHECK_ROWS=True)
                p = tl.where(keys[None, :] >= first_seen[:, None], p, 0.0)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta_tile[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit
def flash_dq_kernel(
    q, k, v, do, lse_log2, delta, starts, dq, stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb,
    stride_vh, stride_v, stride_dob, stride_doh, stride_do, stride_dqb, stride_dqh, stride_dq, n_heads, group,
    n_queries, n_keys, scale, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (B, H, Q, D); one program per query tile, causal ones from the longest down."""
    tile, batch_head, batch, head = own_tile(n_heads, n_queries, BLOCK_Q, CAUSAL)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + (head // group) * stride_kh
    v += batch * stride_vb + (head // group) * stride_vh
    do += batch * stride_dob + head * stride_doh
    dq += batch * stride_dqb + head * stride_dqh
    lse_log2 += batch_head.to(tl.int64) * n_queries
    delta += batch_head.to(tl.int64) * n_queries
    first_query = tile * BLOCK_Q
    unmasked_end, end = seen_keys(first_query, n_queries, n_keys, BLOCK_Q, BLOCK_K, CAUSAL)

    q_tile = load_tile(q, first_query, n_queries, stride_q, BLOCK_Q, D, BLOCK_D, CHECK_ROWS=True)
    do_tile = load_tile(do, first_query, n_queries, stride_do, BLOCK_Q, D, BLOCK_D, CHECK_ROWS=True)
    lse_tile = load_row_values(lse_log2, first_query, n_queries, float("inf"), BLOCK_Q, CHECK_ROWS=True)
    delta_tile = load_row_values(delta, first_query, n_queries, 0.0, BLOCK_Q, CHECK_ROWS=True)
    dq_sum = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    first, unmasked, n_done = unmasked_end, 0, 0
    if PACKED:
        starts += batch * n_queries
        first, unmasked = document_keys(starts, first_query, n_queries, unmasked_end, BLOCK_Q, BLOCK_K)
        n_done = unmasked_end - unmasked
    dq_sum = add_keys(
        dq_sum, q_tile, do_tile, lse_tile, delta_tile, k, v, starts, stride_k, stride_v, first_query, unmasked,
        unmasked_end, 0, 0, n_queries, n_keys, scale_log2, D, BLOCK_Q, BLOCK_K, BLOCK_D, CAUSAL, False, PACKED,
        PRECISION,
    )  # fmt: skip
    dq_sum = add_keys(
        dq_sum, q_tile, do_tile, lse_tile, delta_tile, k, v, starts, stride_k, stride_v, first_query, first, end,
        unmasked, n_done, n_queries, n_keys, scale_log2, D, BLOCK_Q, BLOCK_K, BLOCK_D, CAUSAL, True, PACKED, PRECISION,
    )  # fmt: skip
    store_tile(dq, dq_sum * scale, first_query, n_queries, stride_dq, BLOCK_Q, D, BLOCK_D)


def launch_backward(
    q_BHQD: Tensor,
    k_BKND: Tensor,
    v_BKND: Tensor,
    o_BHQD: Tensor,
    lse_BHQ: Tensor,
    do_BHQD: Tensor,
    dq_BHQD: Tensor | None,
    dk_BKND: Tensor | None,
    dv_BKND: Tensor | None,
    causal: bool,
    scale: float,
    starts_BQ: Tensor | None = None,
) -> None:
    """Write dq, dk and dv, except those that are None (dk and dv are both None or neither).

    Outputs whose strides the kernels do not support (``with_short_rows``) are written to a buffer and copied.
    """
    q, k, v, o, do = (with_short_rows(x) for x in (q_BHQD, k_BKND, v_BKND, o_BHQD, do_BHQD))
    gradients = dq_BHQD, dk_BKND, dv_BKND
    dq, dk, dv = (None if x is None else writable(x) for x in gradients)
    batch, n_heads, n_queries, d_head = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    if batch == 0:
        return

    lse_log2, delta = launch_preprocess(o, do, lse_BHQ.contiguous())
    common = {"D": d_head, "BLOCK_D": next_power_of_2(d_head), "CAUSAL": causal, "PRECISION": input_precision(d_head)}
    common["PACKED"] = starts_BQ is not None
    starts = ends = delta
    if starts_BQ is not None:
        starts, ends = starts_BQ, ends_of(starts_BQ, n_keys)
    inputs = (q, k, v, do, lse_log2, delta)
    strides = [stride for x in (q, k, v, do) for stride in x.stride()[:3]]
    sizes_and_scales = (n_heads // n_kv_heads, n_queries, n_keys, scale, scale * LOG2_E.value)
    if dk is not None and dv is not None:
        tile = tile_for("dkdv", d_head, q.element_size())
        launch(
            flash_dkdv_kernel,
            (ceil_div(n_keys, tile.block_k) * batch * n_kv_heads,),
            *(*inputs, ends, dk, dv),
            *(*strides, *dk.stride()[:3], *dv.stride()[:3]),
            *(n_kv_heads, *sizes_and_scales),
            **tile.launch_options(),
            **common,
        )
    if dq is not None:
        tile = tile_for("dq", d_head, q.element_size())
        launch(
            flash_dq_kernel,
            (ceil_div(n_queries, tile.block_q) * batch * n_heads,),
            *(*inputs, starts, dq, *strides, *dq.stride()[:3]),
            *(n_heads, *sizes_and_scales),
            **tile.launch_options(),
            **common,
        )
    for gradient, written in zip(gradients, (dq, dk, dv), strict=True):
        if gradient is not None and written is not None and written is not gradient:
            gradient.copy_(written)
