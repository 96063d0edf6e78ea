"""The small device functions that the forward and backward kernels share.

Layout: every matrix is one head's (rows, D), with contiguous columns and rows ``stride`` elements apart. A tile's start
is computed in int64, as one scalar per tile, so tensors may exceed 2^31 elements; offsets inside a tile are int32 (the
launchers copy a tensor whose row stride is too large for that).

Tiles have power-of-two sizes. ``BLOCK_D`` is the head dim rounded up; if the two are equal, there is no column mask.
Rows are masked only if the caller says that a tile may extend past the end.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_offsets(stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """int32 offsets (ROWS, BLOCK_D) of a tile's elements from its first."""
    return tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(
    head, first_row, n_rows, stride,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows first_row to first_row + ROWS of one head as (ROWS, BLOCK_D), zero outside of the head."""
    pointers = head + tl.cast(first_row, tl.int64) * stride + tile_offsets(stride, ROWS, BLOCK_D)
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    if CHECK_ROWS and D < BLOCK_D:
        tile = tl.load(pointers, mask=(rows[:, None] < n_rows) & (columns[None, :] < D), other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=rows[:, None] < n_rows, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(pointers, mask=columns[None, :] < D, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(head, tile, first_row, n_rows, stride, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the part of a (ROWS, BLOCK_D) tile that is inside the head, rounded to the tensor's dtype."""
    pointers = head + tl.cast(first_row, tl.int64) * stride + tile_offsets(stride, ROWS, BLOCK_D)
    rows = first_row + tl.arange(0, ROWS)
    inside = rows[:, None] < n_rows
    if D < BLOCK_D:
        inside = inside & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(pointers, tile.to(head.dtype.element_ty), mask=inside)


@triton.jit
def load_row_values(head, first_row, n_rows, other: tl.constexpr, ROWS: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """One number per row, (ROWS,), and ``other`` for rows past the end."""
    rows = first_row + tl.arange(0, ROWS)
    return tl.load(head + rows, mask=rows < n_rows, other=other) if CHECK_ROWS else tl.load(head + rows)


@triton.jit
def own_tile(n_heads, n_queries, BLOCK_Q: tl.constexpr, CAUSAL: tl.constexpr):
    """(tile, batch and head, batch, head) of this program; causal tiles are numbered from the longest down."""
    n_tiles = tl.cdiv(n_queries, BLOCK_Q)
    tile = tl.program_id(0) % n_tiles
    if CAUSAL:
        tile = n_tiles - 1 - tile
    batch_head = tl.program_id(0) // n_tiles
    batch = (batch_head // n_heads).to(tl.int64)
    head = (batch_head % n_heads).to(tl.int64)
    return tile, batch_head, batch, head


@triton.jit
def seen_keys(first_query, n_queries, n_keys, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr):
    """(end of the key tiles that every query of a tile sees entirely, end of the keys that any of them sees)."""
    if CAUSAL:
        shift = n_keys - n_queries
        unmasked_end = tl.maximum(first_query + shift + 1, 0) // BLOCK_K * BLOCK_K
        end = tl.minimum(first_query + BLOCK_Q, n_queries) + shift
    else:
        unmasked_end = n_keys // BLOCK_K * BLOCK_K
        end = n_keys
    return unmasked_end, end


@triton.jit
def document_keys(starts, first_query, n_queries, unmasked_end, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """(first key tile that any query of a tile sees, first key tile that all its queries see entirely).

    ``starts`` (Q,) int32 is the first key of each query's document; it does not decrease.
    """
    first = tl.load(starts + first_query) // BLOCK_K * BLOCK_K
    last_start = tl.load(starts + tl.minimum(first_query + BLOCK_Q, n_queries) - 1)
    return first, tl.minimum(tl.cdiv(last_start, BLOCK_K) * BLOCK_K, unmasked_end)


@triton.jit
def visible(queries, keys, n_keys, n_queries, CAUSAL: tl.constexpr):
    """Whether a query sees a key, for broadcastable index blocks; causal: the last query sees the last key."""
    return keys <= queries + (n_keys - n_queries) if CAUSAL else keys < n_keys
