"""The Hopper backward's passes over memory before and after its main kernel, in plain Triton.

    preprocess    reads o, do, lse; writes lse / scale and delta in parts that a matmul can subtract, and zeros for dq
    postprocess   reads the fp32 sums of dq; writes dq. For blocks, which rotate q and k, it also rotates dq and dk back

Intermediate tensors pad queries to a multiple of 128, so that no step reads past a head's end.

Shape legend: B batch, H query heads, Q queries, D head dim.
"""

import torch
import triton
import triton.language as tl

from cs336_systems.attention.hopper.primitives import PARTS, STATISTICS, part_weight
from cs336_systems.kernels.absmax import magnitude_bits, raise_absmax
from cs336_systems.kernels.copy_engine import example
from cs336_systems.kernels.launching import Prepared, ceil_div

PASS_ROWS = 64
"""Rows per program, and per part of dq's sums."""
PADDED_ROWS = 128
"""Queries of a head are padded to a multiple of this."""
LSE_OF_NOTHING = tl.constexpr(2.0**30)
"""The lse / scale of queries that do not exist or see no key. Finite, as infinity times a weight of 0 would be NaN."""


@triton.jit
def split(numbers, tile, FIRST: tl.constexpr):
    """Return ``tile`` with fp32 ``numbers`` (rows,) in columns FIRST, FIRST + 1, ..., split into parts.

    Each part is the remainder after the previous parts, divided by its weight.
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

    If delta or lse / scale is not finite in this dtype (2 ** 31 and more in fp16), the query's P and dP are NaN.
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
def halves_of_sums(summed, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first and the second D / 2 columns of the fp32 sums of 64 queries, (64, BLOCK_D / 2) each.

    Memory holds first one consumer's half (BLOCK_D / 2 columns), then the other's. Each half is stored in groups of
    eight columns, with four numbers of each of 128 threads: two of its row and two of the row eight below, as in
    wgmma's result.
    """
    PART_COLUMNS: tl.constexpr = BLOCK_D // 2
    sums = tl.load(summed + tl.arange(0, 64 * BLOCK_D))
    # Part, eight columns, warp, group of four threads, thread of four, one of two rows, one of two columns.
    sums = tl.reshape(sums, (2, PART_COLUMNS // 8, 4, 8, 4, 2, 2))
    sums = tl.reshape(tl.permute(sums, (2, 5, 3, 1, 4, 6, 0)), (64, PART_COLUMNS, 2))
    if D == BLOCK_D:
        return tl.split(sums)
    rows = tl.reshape(tl.permute(sums, (0, 2, 1)), (64, BLOCK_D))
    first = tl.broadcast_to(tl.arange(0, PART_COLUMNS)[None, :], (64, PART_COLUMNS))
    return tl.gather(rows, first, 1), tl.gather(rows, first + D // 2, 1)


@triton.jit
def _first_halves(gradient, stride_b, stride_h, stride, batch, head, rows, pairs):
    """Addresses of the first halves of a head's rows."""
    return gradient + batch * stride_b + head * stride_h + rows[:, None].to(tl.int64) * stride + pairs


@triton.jit
def _store_rotated(
    x, y, at, exists, cos, sin, absmax, rows, pairs, DTYPE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Store both halves of rows, in fp32, rotated back by their positions' angles if given."""
    if cos is not None:
        angles = rows[:, None] * (D // 2) + pairs
        cosine, sine = tl.load(cos + angles, mask=exists, other=0.0), tl.load(sin + angles, mask=exists, other=0.0)
        x, y = x * cosine + y * sine, y * cosine - x * sine
    _raise_absmax(absmax, x, y, exists, DTYPE)
    tl.store(at, x.to(DTYPE), mask=exists)
    tl.store(at + D // 2, y.to(DTYPE), mask=exists)


@triton.jit
def _raise_absmax(absmax, x, y, exists, DTYPE: tl.constexpr):
    if absmax is not None:
        bits = tl.maximum(magnitude_bits(x), magnitude_bits(y))
        raise_absmax(absmax, tl.where(exists, bits, 0), DTYPE)


@triton.jit
def hopper_postprocess_kernel(
    summed, dq, dk, dv, cos, sin, absmax, stride_dqb, stride_dqh, stride_dq, stride_dkb, stride_dkh, stride_dk,
    stride_dvb, stride_dvh, stride_dv, n_heads, n_kv_heads, n_heads_in_all, n_queries, padded, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq (B, H, Q, D) in its dtype from the fp32 sums, each 64 rows of BLOCK_D in the order of ``halves_of_sums``.

    With cos and sin (Q, D / 2), dq after rounding, and dk in place, are rotated back as by ``rotary.py``. With absmax,
    the largest magnitude of dq, dk and dv is recorded. Heads are those of q, then those of k, then those of v.
    """
    n_tiles = tl.cdiv(n_queries, ROWS)
    first = tl.program_id(0) % n_tiles * ROWS
    rows, pairs = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_D // 2)[None, :]
    batch_head = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, head = batch_head // n_heads_in_all, batch_head % n_heads_in_all
    exists = (rows < n_queries)[:, None] & (pairs < D // 2)
    DTYPE: tl.constexpr = dq.dtype.element_ty
    if head < n_heads:
        sums = summed + ((batch * n_heads + head) * padded + first) * BLOCK_D
        x, y = halves_of_sums(sums, D, BLOCK_D)
        x, y = (x * scale).to(DTYPE).to(tl.float32), (y * scale).to(DTYPE).to(tl.float32)
        at = _first_halves(dq, stride_dqb, stride_dqh, stride_dq, batch, head, rows, pairs)
        _store_rotated(x, y, at, exists, cos, sin, absmax, rows, pairs, DTYPE, D)
    elif cos is not None:
        head -= n_heads
        if head < n_kv_heads:
            at = _first_halves(dk, stride_dkb, stride_dkh, stride_dk, batch, head, rows, pairs)
            x = tl.load(at, mask=exists, other=0.0).to(tl.float32)
            y = tl.load(at + D // 2, mask=exists, other=0.0).to(tl.float32)
            _store_rotated(x, y, at, exists, cos, sin, absmax, rows, pairs, DTYPE, D)
        else:
            at = _first_halves(dv, stride_dvb, stride_dvh, stride_dv, batch, head - n_kv_heads, rows, pairs)
            x = tl.load(at, mask=exists, other=0.0).to(tl.float32)
            y = tl.load(at + D // 2, mask=exists, other=0.0).to(tl.float32)
            _raise_absmax(absmax, x, y, exists, DTYPE)


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
    n_kv_heads: int,
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    padded: int,
    block_d: int,
    scale: float,
    rotated: bool,
    noted: bool,
) -> Prepared:
    """A launch that takes the addresses of the sums and of dq; if ``rotated``, then those of dk, dv, cos and sin; if
    ``noted``, then that of absmax.

    ``strides`` are those of dq, dk and dv.
    """
    batch, n_heads, n_queries, d_head = shape_BHQD
    n_heads_in_all = n_heads + (rotated + noted) * n_kv_heads
    f32 = torch.float32
    return Prepared(
        hopper_postprocess_kernel,
        ceil_div(n_queries, PASS_ROWS) * batch * n_heads_in_all,
        example(f32),
        example(dtype),
        *((example(dtype), example(dtype), example(f32), example(f32)) if rotated else (None,) * 4),
        torch.empty(2)[1:] if noted else None,  # an element of a larger tensor, at any address
        *(step for each in strides for step in each[:3]),
        n_heads,
        n_kv_heads,
        n_heads_in_all,
        n_queries,
        padded,
        scale,
        D=d_head,
        BLOCK_D=block_d,
        ROWS=PASS_ROWS,
        enable_fp_fusion=False,  # ``rotary.py`` rounds each product
    )
