"""Merges the outputs of attention over two sets of keys into the output over both, in place and in one pass.

Formula, for the outputs o and p over each set of keys, and the log-sum-exp of its scores, l and m:

    lse = log(exp(l) + exp(m))
    o   = o exp(l - lse) + p exp(m - lse)

Context-parallel ranks merge partial outputs this way (Liu et al. 2023, "Ring Attention with Blockwise Transformers").

Rounding: computed in fp32; the output is rounded once, to its dtype.

Traffic: reads o, p, l and m, writes o and l: 6 bytes an element of a bf16 output and 12 a row. Eager code in fp32 makes
some ten passes.

Limits: outputs in fp32, bf16 or fp16, whose last dimension is contiguous; in each row l or m is finite.

    merge_attention_(o, lse, part_o, part_lse)

Shape legend: B batch, H query heads, S queries, E d_head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.launching import ceil_div, check_runnable, launch, next_power_of_2

BLOCK_ELEMENTS = 4096
"""Elements of a program: 32 for each of 128 threads, so that each has eight loads of 16 bytes of bf16 under way."""


@triton.jit
def merge_attention_kernel(
    o, lse, part_o, part_lse, n_rows, n_heads, n_queries, d_head,
    o_batch, o_head, o_query, lse_batch, lse_head, lse_query,
    part_batch, part_head, part_query, part_lse_batch, part_lse_head, part_lse_query,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge a part into o (B, H, S, E) and lse (B, H, S); rows go in the order (B, S, H), as outputs lie in memory."""
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    head = rows % n_heads
    query = rows // n_heads % n_queries
    batch = rows // n_heads // n_queries
    inside = rows < n_rows
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns[None, :] < d_head)
    lse_at = lse + batch * lse_batch + head * lse_head + query * lse_query
    part_lse_at = part_lse + batch * part_lse_batch + head * part_lse_head + query * part_lse_query
    o_at = o + (batch * o_batch + head * o_head + query * o_query)[:, None] + columns[None, :]
    part_at = part_o + (batch * part_batch + head * part_head + query * part_query)[:, None] + columns[None, :]
    own = tl.load(lse_at, mask=inside, other=0.0)
    other = tl.load(part_lse_at, mask=inside, other=0.0)
    both = tl.maximum(own, other) + tl.log(1.0 + tl.exp(-tl.abs(own - other)))
    merged = tl.load(o_at, mask=mask, other=0.0).to(tl.float32) * tl.exp(own - both)[:, None]
    merged += tl.load(part_at, mask=mask, other=0.0).to(tl.float32) * tl.exp(other - both)[:, None]
    tl.store(o_at, merged, mask=mask)
    tl.store(lse_at, both, mask=inside)


def merge_attention_(o_BHSE: Tensor, lse_BHS: Tensor, part_o_BHSE: Tensor, part_lse_BHS: Tensor) -> None:
    """Merge attention over further keys into o and lse, in place.

    Args:
        o_BHSE: attention's output over some keys (B, H, S, E).
        lse_BHS: log-sum-exp of its scores (B, H, S), fp32.
        part_o_BHSE: the output over the further keys (B, H, S, E).
        part_lse_BHS: log-sum-exp of its scores (B, H, S), fp32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an output's last dimension is not contiguous.
    """
    shape = tuple(o_BHSE.shape)
    shapes = [tuple(each.shape) for each in (part_o_BHSE, lse_BHS, part_lse_BHS)]
    if shapes != [shape, shape[:3], shape[:3]]:
        raise ValueError(f"an output {shape} is not merged with part, lse and part's lse of shapes {shapes}")
    if (lse_BHS.dtype, part_lse_BHS.dtype) != 2 * (torch.float32,):
        raise ValueError(f"lse must be torch.float32, got {lse_BHS.dtype} and {part_lse_BHS.dtype}")
    for x in (o_BHSE, part_o_BHSE):
        check_runnable(merge_attention_kernel, x)
        if x.device != lse_BHS.device or x.device != part_lse_BHS.device or x.stride(-1) != 1:
            raise ValueError(f"heads must be contiguous on {lse_BHS.device}, got strides {x.stride()} on {x.device}")
    n_batch, n_heads, n_queries, d_head = shape
    block_d = next_power_of_2(d_head)
    block_rows = max(1, BLOCK_ELEMENTS // block_d)
    n_rows = n_batch * n_heads * n_queries
    launch(
        merge_attention_kernel,
        (ceil_div(n_rows, block_rows),),
        *(o_BHSE, lse_BHS, part_o_BHSE, part_lse_BHS, n_rows, n_heads, n_queries, d_head),
        *o_BHSE.stride()[:3],
        *lse_BHS.stride(),
        *part_o_BHSE.stride()[:3],
        *part_lse_BHS.stride(),
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_d,
    )
