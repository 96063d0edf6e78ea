"""The Hopper backward's passes over memory before and after its main kernel, in plain Triton.

    preprocess    reads o, do, lse; writes lse / scale and delta in parts that a matmul can subtract, and zeros for dq
    postprocess   reads the fp32 sums of dq; writes dq

Queries are padded to a multiple of 128 in what is written in between, so that no step reads past a head's end.

Shape legend: B batch, H query heads, Q queries, D head dim.
"""

import torch
import triton
import triton.language as tl

from cs336_systems.attention.hopper.primitives import PARTS, STATISTICS, part_weight
from cs336_systems.kernels.copy_engine import example
from cs336_systems.kernels.launching import Prepared, ceil_div

PASS_ROWS = 64
"""Rows per program, and of a part of dq's sums."""
PADDED_ROWS = 128
"""Queries of a head are padded to a multiple of this."""
LSE_OF_NOTHING = tl.constexpr(2.0**30)
"""The lse / scale of queries that do not exist or see no key. Finite, as infinity times a weight of 0 would be NaN."""


@triton.jit
def split(numbers, tile, FIRST: tl.constexpr):
    """Return ``tile`` with fp32 ``numbers`` (rows,) in columns FIRST, FIRST + 1, ..., split into parts.

    Each holds, divided by its weight, what the parts before leave over.
    """
    columns = tl.arange(0, tile.shape[1])
    for part in tl.static_range(PARTS):
        rounded = (numbers / part_weight(part)).to(tile.dtype)
        numbers -= rounded.to(tl.float32) * part_weight(part)
        tile = tl.where(columns == FIRST + part, rounded[:, None], tile)
    return tile


@triton.jit
def hopper_preprocess_kernel(
    o, do, lse, stats, dq, stride_ob, stride_oh, stride_o, stride_dob, stride_doh, stride_do, n_heads, n_queries,
    padded, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """stats (B H, padded, STATISTICS): three parts of lse / scale, three of delta = rowsum(o * do), zeros; dq: zeros.

    Where delta or lse / scale is not finite in this dtype (2 ** 31 and more in fp16), the query's P and dP are NaN.
    """
    n_tiles = padded // ROWS
    rows = tl.program_id(0) % n_tiles * ROWS + tl.arange(0, ROWS)
    batch_head = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, head = batch_head // n_heads, batch_head % n_heads
    columns = tl.arange(0, BLOCK_D)
    row_exists = rows < n_queries
    exists = row_exists[:, None] & (columns < D)[None, :]
    o += batch * stride_ob + head * stride_oh
    do += batch * stride_dob + head * stride_doh
    o_tile = tl.load(o + rows[:, None].to(tl.int64) * stride_o + columns, mask=exists, other=0.0)
    do_tile = tl.load(do + rows[:, None].to(tl.int64) * stride_do + columns, mask=exists, other=0.0)
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    natural = tl.load(lse + batch_head * n_queries + rows, mask=row_exists, other=float("-inf"))
    subtracted = tl.where(natural == float("-inf"), LSE_OF_NOTHING, natural / scale)
    row = batch_head * padded + rows
    tile = tl.zeros((ROWS, STATISTICS), stats.dtype.element_ty)
    tile = split(subtracted, tile, 0)
    tile = split(delta, tile, PARTS)
    tl.store(stats + row[:, None] * STATISTICS + tl.arange(0, STATISTICS), tile)
    dq += row[:, None] * BLOCK_D + columns
    tl.store(dq, tl.zeros((ROWS, BLOCK_D), tl.float32))


@triton.jit
def element_of_sums(row, column, PART_COLUMNS: tl.constexpr):
    """The index of dq[row, column], of 64 queries, among their fp32 sums.

    First one consumer's half, of PART_COLUMNS columns, then the other's; in one, eight columns after the other: four
    numbers of each of 128 threads, which are two of its row and two of the row eight further, as wgmma's result has
    them.
    """
    part, column = column // PART_COLUMNS, column % PART_COLUMNS
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return part * (64 * PART_COLUMNS) + column // 8 * 512 + thread * 4 + row // 8 % 2 * 2 + column % 2


@triton.jit
def hopper_postprocess_kernel(
    summed, dq, stride_dqb, stride_dqh, stride_dq, n_heads, n_queries, padded, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq (B, H, Q, D) in its dtype from the fp32 sums, each 64 rows of BLOCK_D in the order of ``element_of_sums``."""
    n_tiles = tl.cdiv(n_queries, ROWS)
    first = tl.program_id(0) % n_tiles * ROWS
    rows = first + tl.arange(0, ROWS)
    batch_head = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, head = batch_head // n_heads, batch_head % n_heads
    columns = tl.arange(0, BLOCK_D)
    elements = element_of_sums(tl.arange(0, ROWS)[:, None], columns[None, :], BLOCK_D // 2)
    sums = tl.load(summed + (batch_head * padded + first) * BLOCK_D + elements)
    dq += batch * stride_dqb + head * stride_dqh + rows[:, None].to(tl.int64) * stride_dq + columns
    exists = (rows < n_queries)[:, None] & (columns < D)[None, :]
    tl.store(dq, (sums * scale).to(dq.dtype.element_ty), mask=exists)


def prepare_preprocess(
    shape_BHQD: tuple[int, ...],
    o_strides: tuple[int, ...],
    do_strides: tuple[int, ...],
    dtype: torch.dtype,
    padded: int,
    block_d: int,
    scale: float,
) -> Prepared:
    """A launch for the addresses of o, do, lse, stats and sums of dq; ``padded`` is a multiple of PADDED_ROWS."""
    batch, n_heads, n_queries, d_head = shape_BHQD
    return Prepared(
        hopper_preprocess_kernel,
        padded // PASS_ROWS * batch * n_heads,
        *(example(of) for of in (dtype, dtype, torch.float32, dtype, torch.float32)),
        *o_strides[:3],
        *do_strides[:3],
        n_heads,
        n_queries,
        padded,
        scale,
        D=d_head,
        BLOCK_D=block_d,
        ROWS=PASS_ROWS,
    )


def prepare_postprocess(
    shape_BHQD: tuple[int, ...],
    dq_strides: tuple[int, ...],
    dtype: torch.dtype,
    padded: int,
    block_d: int,
    scale: float,
) -> Prepared:
    """A launch that takes the addresses of the sums and of dq."""
    batch, n_heads, n_queries, d_head = shape_BHQD
    return Prepared(
        hopper_postprocess_kernel,
        ceil_div(n_queries, PASS_ROWS) * batch * n_heads,
        example(torch.float32),
        example(dtype),
        *dq_strides[:3],
        n_heads,
        n_queries,
        padded,
        scale,
        D=d_head,
        BLOCK_D=block_d,
        ROWS=PASS_ROWS,
    )
