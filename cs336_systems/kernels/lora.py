"""Low-rank adapters (LoRA) of a large matmul, in kernels that pass over memory once; formulas: ``lora_reference``.

    h = shrink(Scaled(x), a.T, (K,), scale)                       # R x n r of R x K
    expand_(y, LowRank(h, b, widths))                             # y += h B^T
    factor_gradients_(da, db, Scaled(x), Scaled(dy), h, dh, widths, accumulate)   # both in one launch

Why. Library kernels have tiles of at least 64 columns, of which 16 are used, and one program per 64 rows: with 2,048
rows, 100 of 132 multiprocessors are idle. Here every multiprocessor has work:

* ``shrink``: a program has 16 to 64 rows and all columns. Rows have up to tens of thousands of columns, so each warp
  sums a slice of them: one chain of additions over all columns would take longer than reading them.
* ``expand_``: a program has 64 x 128 elements of y. If a SwiGLU or matmul kernel reads or writes y anyway, it adds the
  term instead (``swiglu.swiglu_backward_``, ``products.launch_product``).
* ``factor_gradients_``: a program has 64 columns of x (for A) or of dy (for B), and all rows. There are no atomics, so
  the bits are the same every time.

Traffic at R rows: shrink reads x; expand_ reads and writes y; gradients read x and dy. Factors, h and dh are small, and
come from the L2 cache.

Sums are in fp32 and rounded once. An fp32 matmul is computed as three TF32 matmuls, as exact as fp32. Quantized x and
dy are read in fp8: their values are multiplied in the factors' dtype, and the sums by the scale.

Limits: fp32, bf16 and fp16, at most three parts; rows of x and y are contiguous, but ``factor_gradients_`` supports any
strides of x and dy.

Shape legend: R rows, K columns of x, N columns of y, r rank, n parts.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.launching import (
    ceil_div,
    check_alike,
    check_runnable,
    launch,
    n_multiprocessors,
    next_power_of_2,
)
from cs336_systems.kernels.lora_reference import LowRank, Scaled

MAX_PARTS = 3
BLOCK_RANK = 64
"""The most columns of h that a program computes or reads at once, so that its tiles fit."""
WARPS_SHRINK, STAGES_SHRINK = 8, 3
"""Eight slices of 64 columns and 16 rows: 16 KB of x per stage, with two stages in flight. A multiprocessor's share of
an H100's bandwidth, 25 bytes per ns, needs some 20 KB in flight."""
BYTES_SHRINK = 2**16
"""The most bytes of x and a factor per stage."""
SUMS_SHRINK = 2048
"""The most sums per warp; each thread holds a 32nd of them in registers."""
BLOCK_ROWS, BLOCK_COLUMNS = 64, 128
"""Rows and columns of y per program of ``expand_``."""
GRADIENT_ROWS, GRADIENT_COLUMNS, GRADIENT_STAGES = 64, 64, 3
"""Elements of x or dy that a program loads at once: 8 KB in bf16, in rows of 128 bytes. Six programs fit on a
multiprocessor, so the 648 programs of gate | up at 7B run concurrently."""


@triton.jit
def part_of(block, width_0, width_1, width_2, BLOCK: tl.constexpr):
    """(part, first column, the part's end) of a block of columns; no block spans two parts."""
    n_0, n_1 = tl.cdiv(width_0, BLOCK), tl.cdiv(width_1, BLOCK)
    if block < n_0:
        part, begin, index, width = 0, 0, block, width_0
    elif block < n_0 + n_1:
        part, begin, index, width = 1, width_0, block - n_0, width_1
    else:
        part, begin, index, width = 2, width_0 + width_1, block - n_0 - n_1, width_2
    return part, begin + index * BLOCK, begin + width


@triton.jit
def shrink_kernel(
    x, factor, out, x_scale, scale, n_rows, row_stride, column_stride, rank_stride, width_0, width_1, width_2,
    N_PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SLICES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out (n_rows, N_PARTS RANK), contiguous; one program per block of rows, part and block of ranks."""
    N_BLOCKS: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    block = tl.program_id(0) % (N_PARTS * N_BLOCKS)
    rows = tl.program_id(0) // (N_PARTS * N_BLOCKS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part, ranks = block // N_BLOCKS, block % N_BLOCKS * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    if part == 0:
        first, width = 0, width_0
    elif part == 1:
        first, width = width_0, width_1
    else:
        first, width = width_0 + width_1, width_2
    row_starts = rows.to(tl.int64) * row_stride
    within = tl.arange(0, SLICES)[:, None, None] * DEPTH
    of_x, of_factor = within + tl.arange(0, DEPTH)[None, None, :], within + tl.arange(0, DEPTH)[None, :, None]
    x_at = x + row_starts[None, :, None] + (first + of_x)
    factor_at = factor + (first + of_factor).to(tl.int64) * column_stride + ranks[None, None, :] * rank_stride
    own_rows, own_ranks = (rows < n_rows)[None, :, None], (ranks < RANK)[None, None, :]
    acc = tl.zeros((SLICES, BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
    for start in tl.range(0, width, SLICES * DEPTH, num_stages=STAGES):
        left = tl.load(x_at + start, mask=own_rows & (start + of_x < width), other=0.0)
        right_at = factor_at + tl.cast(start, tl.int64) * column_stride
        right = tl.load(right_at, mask=own_ranks & (start + of_factor < width), other=0.0)
        acc = tl.dot(left.to(right.dtype), right, acc, input_precision="tf32x3")
    if SCALED:
        scale *= tl.load(x_scale)
    at = out + rows.to(tl.int64)[:, None] * (N_PARTS * RANK) + (part * RANK + ranks)[None, :]
    tl.store(at, tl.sum(acc, axis=0) * scale, mask=(rows < n_rows)[:, None] & (ranks < RANK)[None, :])


@triton.jit
def low_rank_of(
    h, factor, h_stride, column_stride, rank_stride, rows, columns, own_rows, own_columns,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """The elements of h factor^T in these rows and columns, in fp32; h begins at the columns of the part."""
    acc = tl.zeros((rows.shape[0], columns.shape[0]), dtype=tl.float32)
    for start in tl.static_range(0, RANK, BLOCK_RANK):
        ranks = start + tl.arange(0, BLOCK_RANK)
        left_at = h + rows.to(tl.int64)[:, None] * h_stride + ranks[None, :]
        left = tl.load(left_at, mask=own_rows[:, None] & (ranks < RANK)[None, :], other=0.0)
        right_at = factor + columns.to(tl.int64)[None, :] * column_stride + ranks[:, None] * rank_stride
        right = tl.load(right_at, mask=(ranks < RANK)[:, None] & own_columns[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    return acc


@triton.jit
def expand_kernel(
    y, h, factor, n_rows, row_stride, h_stride, column_stride, rank_stride, n_blocks, width_0, width_1, width_2,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """y += h factor^T by parts; one program per block of rows and block of columns (n_blocks)."""
    part, first, end = part_of(tl.program_id(0) % n_blocks, width_0, width_1, width_2, BLOCK_COLUMNS)
    rows = tl.program_id(0) // n_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    own_rows, own_columns = rows < n_rows, columns < end
    at = y + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    inside = own_rows[:, None] & own_columns[None, :]
    before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    added = low_rank_of(
        h + part * RANK, factor, h_stride, column_stride, rank_stride, rows, columns, own_rows, own_columns,
        RANK, BLOCK_RANK,
    )  # fmt: skip
    tl.store(at, before + added, mask=inside)


@triton.jit
def factor_gradient(
    gradient, x, narrow, scale, n_rows, first, end, row_stride, column_stride, narrow_stride, to_column, to_rank,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, ADDS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """gradient = x^T narrow for a block of the columns of x; to_column and to_rank are the gradient's strides."""
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.arange(0, BLOCK_ROWS)
    x_at = x + columns.to(tl.int64)[:, None] * column_stride
    for first_rank in tl.static_range(0, RANK, BLOCK_RANK):
        ranks = first_rank + tl.arange(0, BLOCK_RANK)
        acc = tl.zeros((BLOCK_COLUMNS, BLOCK_RANK), dtype=tl.float32)
        for start in tl.range(0, n_rows, BLOCK_ROWS, num_stages=STAGES):
            own = (start + rows).to(tl.int64)
            left_at = x_at + own[None, :] * row_stride
            left = tl.load(left_at, mask=(columns < end)[:, None] & (own < n_rows)[None, :], other=0.0)
            right_at = narrow + own[:, None] * narrow_stride + ranks[None, :]
            right = tl.load(right_at, mask=(own < n_rows)[:, None] & (ranks < RANK)[None, :], other=0.0)
            acc = tl.dot(left.to(right.dtype), right, acc, input_precision="tf32x3")
        if SCALED:
            acc *= tl.load(scale)
        at = gradient + columns.to(tl.int64)[:, None] * to_column + ranks.to(tl.int64)[None, :] * to_rank
        inside = (columns < end)[:, None] & (ranks < RANK)[None, :]
        if ADDS:
            acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, acc, mask=inside)


@triton.jit
def factor_gradients_kernel(
    da, db, x, dy, h, dh, x_scale, dy_scale, n_rows, n_of_a, width, x_row, x_column, dy_row, dy_column, da_row,
    width_0, width_1, width_2,
    N_PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK_A: tl.constexpr, BLOCK_RANK_B: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, STAGES: tl.constexpr, ADDS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """da (N_PARTS RANK, width) and db (N, RANK); the first n_of_a programs process columns of x, the others of dy."""
    block, narrow_stride = tl.program_id(0), N_PARTS * RANK
    if block < n_of_a:
        factor_gradient(
            da, x, dh, x_scale, n_rows, block * BLOCK_COLUMNS, width, x_row, x_column, narrow_stride, 1, da_row,
            N_PARTS * RANK, BLOCK_RANK_A, BLOCK_ROWS, BLOCK_COLUMNS, STAGES, ADDS, SCALED,
        )  # fmt: skip
    else:
        part, first, end = part_of(block - n_of_a, width_0, width_1, width_2, BLOCK_COLUMNS)
        factor_gradient(
            db, dy, h + part * RANK, dy_scale, n_rows, first, end, dy_row, dy_column, narrow_stride, RANK, 1,
            RANK, BLOCK_RANK_B, BLOCK_ROWS, BLOCK_COLUMNS, STAGES, ADDS, SCALED,
        )  # fmt: skip


def block_rank(rank: int) -> int:
    """Columns of h per tile; tensor cores need at least 16."""
    return min(BLOCK_RANK, max(16, next_power_of_2(rank)))


def shrink(x_RN: Scaled, factor_Nr: Tensor, widths: Sequence[int], scale: float) -> Tensor:
    """``lora_reference.shrink``.

    Raises:
        ValueError: shapes do not match, a dtype is not fp32, bf16 or fp16, or there is no CUDA device.
    """
    values, x_scale = x_RN
    n_rows, rank, n_parts = len(values), factor_Nr.shape[1], len(widths)
    _check_parts(x_RN, factor_Nr, widths)
    x = values if values.stride(1) == 1 else values.contiguous()
    out = factor_Nr.new_empty(n_rows, n_parts * rank)
    ranks = block_rank(rank)
    n_beside = n_parts * ceil_div(rank, ranks)
    enough = n_multiprocessors(x.device) * 3 // 4
    fitting = [n for n in (64, 32) if ceil_div(n_rows, n) * n_beside >= enough and n * ranks <= SUMS_SHRINK]
    block_rows, depth = fitting[0] if fitting else 16, 64
    while WARPS_SHRINK * depth * (block_rows + ranks) * factor_Nr.element_size() > BYTES_SHRINK:
        depth //= 2
    launch(
        shrink_kernel,
        (ceil_div(n_rows, block_rows) * n_beside,),
        *(x, factor_Nr, out, out if x_scale is None else x_scale, scale, n_rows, x.stride(0)),
        *(*factor_Nr.stride(), *_three(widths)),
        N_PARTS=n_parts,
        RANK=rank,
        BLOCK_RANK=ranks,
        BLOCK_ROWS=block_rows,
        SLICES=WARPS_SHRINK,
        DEPTH=depth,
        STAGES=STAGES_SHRINK,
        SCALED=x_scale is not None,
        num_warps=WARPS_SHRINK,
    )
    return out


def expand_(y_RN: Tensor, low: LowRank) -> None:
    """``lora_reference.expand_``.

    Raises:
        ValueError: as ``shrink``, or a row of y is not contiguous.
    """
    check_low_rank(y_RN, low)
    if y_RN.stride(1) != 1:
        raise ValueError(f"y is added to row by row, and must have contiguous rows, got strides {y_RN.stride()}")
    n_blocks = sum(ceil_div(width, BLOCK_COLUMNS) for width in low.widths)
    launch(
        expand_kernel,
        (ceil_div(len(y_RN), BLOCK_ROWS) * n_blocks,),
        *(y_RN, low.h, low.factor, len(y_RN), y_RN.stride(0), low.h.stride(0), *low.factor.stride()),
        *(n_blocks, *_three(low.widths)),
        RANK=low.factor.shape[1],
        BLOCK_RANK=block_rank(low.factor.shape[1]),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=4,
    )


def factor_gradients_(
    da: Tensor | None,
    db: Tensor | None,
    x_RK: Scaled,
    dy_RN: Scaled,
    h_Rr: Tensor,
    dh_Rr: Tensor,
    widths: Sequence[int],
    accumulate: bool,
) -> None:
    """``lora_reference.factor_gradients_`` for contiguous gradients, h and dh.

    Raises:
        ValueError: as ``shrink``, or a tensor that must be contiguous is not.
    """
    (x, x_scale), (dy, dy_scale) = x_RK, dy_RN
    n_parts, rank, width = len(widths), h_Rr.shape[1] // len(widths), x.shape[1]
    contiguous = {"da": da, "db": db, "h": h_Rr, "dh": dh_Rr}
    for name, tensor in contiguous.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    for gradient, shape in ((da, (n_parts * rank, width)), (db, (dy.shape[1], rank))):
        if gradient is not None and gradient.shape != shape:
            raise ValueError(f"a gradient of shape {shape} does not fit memory of shape {tuple(gradient.shape)}")
    if h_Rr.shape != dh_Rr.shape or len({len(x), len(dy), len(h_Rr)}) > 1 or sum(widths) != dy.shape[1]:
        shapes = [tuple(tensor.shape) for tensor in (x, dy, h_Rr, dh_Rr)]
        raise ValueError(f"x, dy, h and dh of shapes {shapes} do not fit parts of {tuple(widths)}")
    if (x_scale is None) != (dy_scale is None):
        raise ValueError(f"x and dy must both have a scale, or neither, got {x.dtype} and {dy.dtype}")
    check_alike(h=h_Rr, dh=dh_Rr, **({"x": x, "dy": dy} if x_scale is None else {}))
    check_runnable(factor_gradients_kernel, h_Rr)
    n_of_a = 0 if da is None else ceil_div(width, GRADIENT_COLUMNS)
    n_of_b = 0 if db is None else sum(ceil_div(each, GRADIENT_COLUMNS) for each in widths)
    launch(
        factor_gradients_kernel,
        (n_of_a + n_of_b,),
        *(h_Rr if da is None else da, h_Rr if db is None else db, x, dy, h_Rr, dh_Rr),
        *(h_Rr if x_scale is None else x_scale, h_Rr if dy_scale is None else dy_scale),
        *(len(x), n_of_a, width, *x.stride(), *dy.stride(), width, *_three(widths)),
        N_PARTS=n_parts,
        RANK=rank,
        BLOCK_RANK_A=block_rank(n_parts * rank),
        BLOCK_RANK_B=block_rank(rank),
        BLOCK_ROWS=GRADIENT_ROWS,
        BLOCK_COLUMNS=GRADIENT_COLUMNS,
        STAGES=GRADIENT_STAGES,
        ADDS=accumulate,
        SCALED=x_scale is not None,
        num_warps=4,
    )


def _three(widths: Sequence[int]) -> tuple[int, ...]:
    return (*widths, *(MAX_PARTS - len(widths)) * (0,))


def check_low_rank(y_RN: Tensor, low: LowRank, n_parts: int = MAX_PARTS) -> None:
    """Raise ValueError unless a kernel can add ``low``, with at most ``n_parts`` parts, to y."""
    _check_parts(Scaled(y_RN), low.factor, low.widths, n_parts)
    h, rank = low.h, low.factor.shape[1]
    if h.shape != (len(y_RN), len(low.widths) * rank) or h.stride(1) != 1:
        raise ValueError(f"h {tuple(h.shape)} with strides {h.stride()} does not fit {len(y_RN)} rows of rank {rank}")
    check_alike(y=y_RN, h=h)


def _check_parts(matrix: Scaled, factor: Tensor, widths: Sequence[int], n_parts: int = MAX_PARTS) -> None:
    wide = matrix.values
    if wide.dim() != 2 or not 1 <= len(widths) <= n_parts or {sum(widths), wide.shape[1]} != {len(factor)}:
        shapes = f"{tuple(wide.shape)} and a factor of {tuple(factor.shape)}"
        raise ValueError(f"parts of {tuple(widths)} columns do not fit a matrix of {shapes}")
    if matrix.scale is None:
        check_alike(wide=wide, factor=factor)
    check_runnable(shrink_kernel, factor)
