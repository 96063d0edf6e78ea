"""FlashAttention-2, before backward: one pass over o and do computes what both kernels of ``backward.py`` read.

Shape legend: B batch, H query heads, Q queries, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.attention.flash.primitives import LOG2_E, load_tile
from cs336_systems.kernels.launching import ceil_div, launch, next_power_of_2

PREPROCESS_ROWS = 32


@triton.jit
def flash_preprocess_kernel(
    o, do, lse, lse_log2, delta, stride_ob, stride_oh, stride_o, stride_dob, stride_doh, stride_do, n_heads, n_queries,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o * do), and lse in base 2 with +inf for rows that see no key: both (B, H, Q), fp32."""
    n_tiles = tl.cdiv(n_queries, BLOCK_Q)
    first_query = tl.program_id(0) % n_tiles * BLOCK_Q
    batch_head = tl.program_id(0) // n_tiles
    batch = (batch_head // n_heads).to(tl.int64)
    head = (batch_head % n_heads).to(tl.int64)
    o += batch * stride_ob + head * stride_oh
    do += batch * stride_dob + head * stride_doh
    o_tile = load_tile(o, first_query, n_queries, stride_o, BLOCK_Q, D, BLOCK_D, CHECK_ROWS=True)
    do_tile = load_tile(do, first_query, n_queries, stride_do, BLOCK_Q, D, BLOCK_D, CHECK_ROWS=True)
    queries = first_query + tl.arange(0, BLOCK_Q)
    inside = queries < n_queries
    rows = batch_head.to(tl.int64) * n_queries + queries
    tl.store(delta + rows, tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1), mask=inside)
    natural = tl.load(lse + rows, mask=inside, other=0.0)
    tl.store(lse_log2 + rows, tl.where(natural == float("-inf"), float("inf"), natural * LOG2_E), mask=inside)


def launch_preprocess(o_BHQD: Tensor, do_BHQD: Tensor, lse_BHQ: Tensor) -> tuple[Tensor, Tensor]:
    """(lse_log2, delta), both (B, H, Q) and fp32, of a contiguous natural lse."""
    batch, n_heads, n_queries, d_head = o_BHQD.shape
    lse_log2, delta = torch.empty_like(lse_BHQ), torch.empty_like(lse_BHQ)
    launch(
        flash_preprocess_kernel,
        (ceil_div(n_queries, PREPROCESS_ROWS) * batch * n_heads,),
        *(o_BHQD, do_BHQD, lse_BHQ, lse_log2, delta),
        *(*o_BHQD.stride()[:3], *do_BHQD.stride()[:3], n_heads, n_queries),
        D=d_head,
        BLOCK_Q=PREPROCESS_ROWS,
        BLOCK_D=next_power_of_2(d_head),
    )
    return lse_log2, delta
