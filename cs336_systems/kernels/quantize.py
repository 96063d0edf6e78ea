"""Quantization to fp8 in one pass, plain and transposed; bit-exact definition: ``quantize_reference.py``.

    q = fp8(x M / max(absmax, 1e-10))          inverse_scale = max(absmax, 1e-10) / M

fp8 matmuls on Hopper need both operands contiguous along the reduction dimension. A layer's x W^T takes x and W in
row-major layout, but its backward takes W^T for dx, and dy^T and x^T for dW. So a tensor is needed in both layouts, and
here one read produces both.

Method: a program holds a tile in registers, with four rows in each thread. q is stored directly. For q_t, the four
bytes of a column form one 32-bit word, and words are transposed through shared memory, with a quarter of the accesses
that bytes would need. Each thread loads and stores 16 bytes at a time.

In blockwise scaling, a scale covers a block of 1 x 128 along the reduction dimension (activations and their gradients)
or of 128 x 128 (weights). A tile of 128 x 128 elements holds whole blocks of either form, of x and of its transpose.

Traffic per bf16 element: reads 2 bytes and writes 1, or 2 for both layouts.

In a whole step at 7B on an H200 all quantization takes 17.8 ms and reaches 91 % of a copy's bandwidth.

Limits: fp32, bf16 and fp16 to e4m3 and e5m2; both dimensions multiples of 16, as fp8 matmuls need; no autograd.

    quantized = quantize(x, absmax(x), torch.float8_e4m3fn, transposed=True)     # q (T, D), q_t (D, T), one scale
    rows, columns = row_and_column_absmax(x)
    quantized = quantize(x, rows, torch.float8_e4m3fn, absmax_t=columns, transposed=True)      # a scale for each row
    quantized = quantize_blocks(weight, torch.float8_e4m3fn, square=True, transposed=True)
    transpose_bytes(q)          # (D, T) of q (T, D): for backward, fp8 weights that were gathered row-major
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.absmax import magnitude_bits
from cs336_systems.kernels.assembly import fp8_bytes, packed
from cs336_systems.kernels.launching import ceil_div, check_device, check_runnable, launch
from cs336_systems.kernels.quantize_reference import (
    BLOCK,
    LARGEST,
    MIN_ABSMAX,
    Quantized,
    check,
    check_absmax,
    check_shape,
    only,
)

SMALLEST = tl.constexpr(MIN_ABSMAX)
LANES = tl.constexpr(4)
"""Rows per word: one byte from each."""


FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


class Tile(NamedTuple):
    """The rows and columns that a program quantizes at once."""

    rows: int
    columns: int
    num_warps: int


TILE = Tile(32, 256, 4)
"""At 16,384 x 14,336 an H200 reaches 99 % of a copy's bandwidth with it, and 98 to 99 % with six others."""
TILE_TRANSPOSED = Tile(128, 128, 8)
"""An earlier form of the kernel reached 90 %, and 87 at 16,384 x 4096; eight other tiles were up to 2 % slower, and one
of 32 columns, 64 bytes of a row of x, 7 %."""


@triton.jit
def scales_of(absmax, LARGEST: tl.constexpr):
    """(scale, inverse scale) for one fp32 absmax or a block of them."""
    clamped = tl.maximum(absmax, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(LARGEST, clamped), tl.div_rn(clamped, LARGEST)


@triton.jit
def load_lanes(x, at, stride, inside):
    """Load four blocks, each of every fourth row. All loads precede stores, as the compiler moves no load over one."""
    return (
        tl.load(x + at, mask=inside, other=0.0),
        tl.load(x + at + stride, mask=inside, other=0.0),
        tl.load(x + at + 2 * stride, mask=inside, other=0.0),
        tl.load(x + at + 3 * stride, mask=inside, other=0.0),
    )


@triton.jit
def load_tile(x, tile_row, tile_column, n_rows, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """A tile of contiguous x (n_rows, width) in four blocks, each of every fourth row.

    Returns (the blocks; the words of four rows and the columns that they hold, and which elements exist; the first
    block's offsets).
    """
    words = tile_row * (TILE_ROWS // LANES) + tl.arange(0, TILE_ROWS // LANES)
    columns = tile_column * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (words < n_rows // LANES)[:, None] & (columns < width)[None, :]
    at = words.to(tl.int64)[:, None] * (LANES * width) + columns[None, :]
    return load_lanes(x, at, width, inside), words, columns, inside, at


@triton.jit
def store_transposed(q_t, word, words, columns, inside, n_rows):
    """Store the words of a tile into q_t (width, n_rows)."""
    at = columns.to(tl.int64)[:, None] * (n_rows // LANES) + words[None, :]
    tl.store(q_t.to(tl.pointer_type(tl.uint32)) + at, tl.trans(word), mask=tl.trans(inside))


@triton.jit
def quantize_kernel(
    x, absmax, absmax_t, q, q_t, inverse_scale, inverse_scale_t, n_rows, width,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """q (n_rows, width) and q_t (width, n_rows) of contiguous x, with one scale, or one for each of their rows."""
    n_tiles = tl.cdiv(width, TILE_COLUMNS)
    tile_row, tile_column = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    blocks, words, columns, inside, at = load_tile(x, tile_row, tile_column, n_rows, width, TILE_ROWS, TILE_COLUMNS)
    if not PER_ROW:
        scale, inverse = scales_of(tl.load(absmax), LARGEST)
        tl.store(inverse_scale, inverse, mask=tl.program_id(0) == 0)
    elif TRANSPOSED:
        exists = columns < width
        column_scale, inverse = scales_of(tl.load(absmax_t + columns, mask=exists, other=0.0), LARGEST)
        tl.store(inverse_scale_t + columns, inverse, mask=exists & (tile_row == 0))
    word = tl.zeros((TILE_ROWS // LANES, TILE_COLUMNS), tl.uint32)
    for lane in tl.static_range(LANES):
        block = blocks[lane].to(tl.float32)
        if not PER_ROW:
            quantized = fp8_bytes(block * scale, DTYPE)
        elif ROWS:
            rows = LANES * words + lane
            row_scale, inverse = scales_of(tl.load(absmax + rows, mask=rows < n_rows, other=0.0), LARGEST)
            tl.store(inverse_scale + rows, inverse, mask=(rows < n_rows) & (tile_column == 0))
            quantized = fp8_bytes(block * row_scale[:, None], DTYPE)
        if ROWS:
            tl.store(q + at + lane * width, quantized.to(DTYPE, bitcast=True), mask=inside)
        if TRANSPOSED:
            if PER_ROW:
                quantized = fp8_bytes(block * column_scale[None, :], DTYPE)
            word = packed(word, quantized, lane)
    if TRANSPOSED:
        store_transposed(q_t, word, words, columns, inside, n_rows)


def empty_pair(like: Tensor, dtype: torch.dtype, rows: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Memory for q and q_t of a matrix like this; an empty tensor for the one that is not requested."""
    n_rows, width = like.shape
    return (
        torch.empty((n_rows, width) if rows else (0,), dtype=dtype, device=like.device),
        torch.empty((width, n_rows) if transposed else (0,), dtype=dtype, device=like.device),
    )


def format_of(dtype: torch.dtype) -> dict[str, Any]:
    """A kernel's constants for an fp8 dtype: its Triton dtype and its largest value."""
    return {"DTYPE": FORMATS[dtype], "LARGEST": LARGEST[dtype]}


def launch_tiles(kernel: Any, tile: Tile, shape: torch.Size, *arguments: Tensor, **constants: Any) -> None:
    """Launch a program for each tile of a matrix; its shape (n_rows, width) follows the arguments."""
    n_rows, width = shape
    grid = (ceil_div(n_rows, tile.rows) * ceil_div(width, tile.columns),)
    sizes = {"TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "num_warps": tile.num_warps}
    launch(kernel, grid, *arguments, n_rows, width, **constants, **sizes)


def quantize(
    x: Tensor,
    absmax: Tensor,
    dtype: torch.dtype,
    *,
    absmax_t: Tensor | None = None,
    rows: bool = True,
    transposed: bool = False,
) -> Quantized:
    """Quantize x (T, D) to fp8, row-major, transposed, or both, in one pass.

    Args:
        x: fp32, bf16 or fp16; copied if not contiguous.
        absmax: fp32: () for one scale, or (T, 1) for one scale per row of q.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        absmax_t: for q_t if absmax is (T, 1): (1, D), one scale per column of x.
        rows, transposed: whether to return q, and whether to return q_t.

    Raises:
        ValueError: a dimension is no multiple of 16, shapes, dtypes or devices do not match, neither q nor q_t is
            requested, or there is no CUDA device.
    """
    check(x, dtype, rows, transposed)
    check_absmax(x, absmax, absmax_t, transposed)
    check_runnable(quantize_kernel, x)
    (n_rows, width), per_row = x.shape, absmax.dim() == 2
    q, q_t = empty_pair(x, dtype, rows, transposed)
    inverse = torch.empty(((n_rows, 1) if rows else (0,)) if per_row else (), device=x.device)
    inverse_t = torch.empty((width, 1) if per_row and transposed else (0,), device=x.device)
    maxima = absmax.contiguous(), (absmax if absmax_t is None else absmax_t).contiguous()
    asked = {"PER_ROW": per_row, "ROWS": rows, "TRANSPOSED": transposed}
    tensors = x.contiguous(), *maxima, q, q_t, inverse, inverse_t
    launch_tiles(
        quantize_kernel, TILE_TRANSPOSED if transposed else TILE, x.shape, *tensors, **format_of(dtype), **asked
    )
    return only(Quantized(q, q_t, inverse, inverse_t if per_row else inverse), rows, transposed)


BLOCK_WARPS = 8
"""Warps per program of blockwise scaling, which quantizes a tile of 128 x 128."""


@triton.jit
def block_scales(bits, LARGEST: tl.constexpr):
    """(scale, inverse scale) for an absmax given as ``magnitude_bits``."""
    return scales_of(bits.to(tl.float32, bitcast=True), LARGEST)


@triton.jit
def quantize_blocks_kernel(
    x, q, q_t, inverse_scale, inverse_scale_t, stride_row, stride_block, stride_t_row, stride_t_block, n_rows, width,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """q (n_rows, width), q_t (width, n_rows) and their inverse scales, of any strides; one tile of x per program."""
    n_tiles = tl.cdiv(width, BLOCK)
    tile_row, tile_column = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    blocks, words, columns, inside, at = load_tile(x, tile_row, tile_column, n_rows, width, BLOCK, BLOCK)
    if SQUARE or TRANSPOSED:
        bits = tl.zeros((BLOCK // LANES, BLOCK), tl.int32)
        for lane in tl.static_range(LANES):
            bits = tl.maximum(bits, magnitude_bits(blocks[lane].to(tl.float32)))
        if SQUARE:
            scale, inverse = block_scales(tl.max(tl.ravel(bits), axis=0), LARGEST)
            if ROWS:
                tl.store(inverse_scale + tile_row * stride_row + tile_column * stride_block, inverse)
            if TRANSPOSED:
                tl.store(inverse_scale_t + tile_column * stride_t_row + tile_row * stride_t_block, inverse)
        else:
            column_scale, inverse = block_scales(tl.max(bits, axis=0), LARGEST)
            tl.store(
                inverse_scale_t + columns * stride_t_row + tile_row * stride_t_block, inverse, mask=columns < width
            )
    word = tl.zeros((BLOCK // LANES, BLOCK), tl.uint32)
    for lane in tl.static_range(LANES):
        block = blocks[lane].to(tl.float32)
        if SQUARE:
            quantized = fp8_bytes(block * scale, DTYPE)
        elif ROWS:
            rows = LANES * words + lane
            row_scale, inverse = block_scales(tl.max(magnitude_bits(block), axis=1), LARGEST)
            tl.store(inverse_scale + rows * stride_row + tile_column * stride_block, inverse, mask=rows < n_rows)
            quantized = fp8_bytes(block * row_scale[:, None], DTYPE)
        if ROWS:
            tl.store(q + at + lane * width, quantized.to(DTYPE, bitcast=True), mask=inside)
        if TRANSPOSED:
            if not SQUARE:
                quantized = fp8_bytes(block * column_scale[None, :], DTYPE)
            word = packed(word, quantized, lane)
    if TRANSPOSED:
        store_transposed(q_t, word, words, columns, inside, n_rows)


def inverse_scales_like(x: Tensor, n_rows: int, width: int, square: bool) -> Tensor:
    """Memory for the inverse scales of a quantized (n_rows, width) matrix on the device of x."""
    n_blocks = ceil_div(width, BLOCK)
    if not square:
        return torch.empty((n_blocks, n_rows), device=x.device).t()
    shape, strides = (ceil_div(n_rows, BLOCK), n_blocks), (4 * ceil_div(n_blocks, 4), 1)
    return torch.empty_strided(shape, strides, device=x.device)


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, *, square: bool = False, rows: bool = True, transposed: bool = False
) -> Quantized:
    """Quantize x (T, D) to fp8, row-major, transposed, or both, with one scale per block, in one pass.

    Inverse scales have the layout that ``torch.nn.functional.scaled_mm`` takes: for 1 x 128 blocks (T, D / 128)
    column-major, for 128 x 128 row-major with a row stride that is a multiple of 4. The last block may be partial.

    Args:
        x: fp32, bf16 or fp16; copied if not contiguous.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        square: whether blocks are 128 x 128; else 1 x 128 along the rows of q and of q_t.
        rows, transposed: whether to return q, and whether to return q_t.

    Raises:
        ValueError: a dimension is no multiple of 16, the dtype is another one, neither q nor q_t is requested, or there
            is no CUDA device.
    """
    check(x, dtype, rows, transposed)
    check_runnable(quantize_blocks_kernel, x)
    n_rows, width = x.shape
    inverse = inverse_scales_like(x, *((n_rows, width) if rows else (0, 0)), square)
    inverse_t = inverse_scales_like(x, *((width, n_rows) if transposed else (0, 0)), square)
    found = Quantized(*empty_pair(x, dtype, rows, transposed), inverse, inverse_t)
    launch(
        quantize_blocks_kernel,
        (ceil_div(n_rows, BLOCK) * ceil_div(width, BLOCK),),
        *(x.contiguous(), *found, *inverse.stride(), *inverse_t.stride(), n_rows, width),
        **format_of(dtype),
        SQUARE=square,
        ROWS=rows,
        TRANSPOSED=transposed,
        BLOCK=BLOCK,
        num_warps=BLOCK_WARPS,
    )
    return only(found, rows, transposed)


@triton.jit
def transpose_bytes_kernel(x, x_t, n_rows, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """x_t (width, n_rows) of contiguous x (n_rows, width)."""
    n_tiles = tl.cdiv(width, TILE_COLUMNS)
    tile_row, tile_column = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    blocks, words, columns, inside, _ = load_tile(x, tile_row, tile_column, n_rows, width, TILE_ROWS, TILE_COLUMNS)
    word = tl.zeros((TILE_ROWS // LANES, TILE_COLUMNS), tl.uint32)
    for lane in tl.static_range(LANES):
        word = packed(word, blocks[lane], lane)
    store_transposed(x_t, word, words, columns, inside, n_rows)


def transpose_bytes(q: Tensor) -> Tensor:
    """The transpose (D, T), row-major, of q (T, D) with one byte per element, such as fp8.

    Raises:
        ValueError: elements are wider, q is no matrix, a dimension is no multiple of 16, or there is no CUDA device.
    """
    check_shape(q)
    if q.dtype.itemsize != 1:
        raise ValueError(f"bytes are transposed, got {q.dtype}")
    check_device(transpose_bytes_kernel, q)
    q_t = q.new_empty(q.shape[::-1])
    tensors = q.contiguous().view(torch.uint8), q_t.view(torch.uint8)
    launch_tiles(transpose_bytes_kernel, TILE_TRANSPOSED, q.shape, *tensors)
    return q_t
