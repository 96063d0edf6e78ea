"""Quantization to fp8 with a scale for each block, found and used in one pass; definition: ``quantize_reference.py``.

Blocks are 1 x 128, along the dimension that a matmul sums over, as for activations and their gradients; or 128 x 128,
as for weights. A tile of 128 x 128 elements holds whole blocks of either form, of x and of the transposed x: so
q and q_t come from one read, as in ``quantize.py``, whose method and limits hold here too.

Inverse scales lie as ``torch.nn.functional.scaled_mm`` takes them: of 1 x 128 blocks (T, D / 128) column by column, of
128 x 128 row by row with rows apart by a multiple of 4. A last block may be less than whole.

    quantized = quantize_blocks(x, torch.float8_e4m3fn, transposed=True)
    quantized = quantize_blocks(weight, torch.float8_e4m3fn, square=True, transposed=True)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.absmax import magnitude_bits
from cs336_systems.kernels.assembly import fp8_bytes, packed
from cs336_systems.kernels.launching import ceil_div, check_runnable, launch, operator
from cs336_systems.kernels.quantize import FORMATS, LANES, load_tile, scales_of, store_transposed
from cs336_systems.kernels.quantize_reference import BLOCK, LARGEST, Quantized, check, only

WARPS = 8


@triton.jit
def block_scales(bits, LARGEST: tl.constexpr):
    """(scale, inverse scale) for magnitude bits."""
    return scales_of(bits.to(tl.float32, bitcast=True), LARGEST)


@triton.jit
def quantize_blocks_kernel(
    x, q, q_t, inverse_scale, inverse_scale_t, stride_row, stride_block, stride_t_row, stride_t_block, n_rows, width,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """q (n_rows, width), q_t (width, n_rows) and their inverse scales, of any strides; a tile of x a program."""
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
    """Empty inverse scales of (n_rows, width) on the device of x."""
    n_blocks = ceil_div(width, BLOCK)
    if not square:
        return torch.empty((n_blocks, n_rows), device=x.device).t()
    shape, strides = (ceil_div(n_rows, BLOCK), n_blocks), (4 * ceil_div(n_blocks, 4), 1)
    return torch.empty_strided(shape, strides, device=x.device)


def results(
    x: Tensor, dtype: torch.dtype, square: bool, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for ``quantize_blocks_op``; one of no elements stands for what was not asked for."""
    n_rows, width = x.shape
    n_rows_t, width_t = (width, n_rows) if transposed else (0, 0)
    n_rows, width = (n_rows, width) if rows else (0, 0)
    return (
        torch.empty((n_rows, width), dtype=dtype, device=x.device),
        torch.empty((n_rows_t, width_t), dtype=dtype, device=x.device),
        inverse_scales_like(x, n_rows, width, square),
        inverse_scales_like(x, n_rows_t, width_t, square),
    )


@operator("quantize_blocks", results)
def quantize_blocks_op(
    x: Tensor, dtype: torch.dtype, square: bool, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, q_t, inverse_scale, inverse_scale_t) of contiguous x."""
    found = results(x, dtype, square, rows, transposed)
    n_rows, width = x.shape
    launch(
        quantize_blocks_kernel,
        (ceil_div(n_rows, BLOCK) * ceil_div(width, BLOCK),),
        *(x, *found, *found[2].stride(), *found[3].stride(), n_rows, width),
        DTYPE=FORMATS[dtype],
        LARGEST=LARGEST[dtype],
        SQUARE=square,
        ROWS=rows,
        TRANSPOSED=transposed,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return found


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, *, square: bool = False, rows: bool = True, transposed: bool = False
) -> Quantized:
    """x (T, D) in fp8, as it is, transposed, or both, each block of 128 with its own scale, in one pass.

    Args:
        x: fp32, bf16 or fp16; other than contiguous costs a copy.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        square: whether blocks are 128 x 128; else 1 x 128, of the rows of q and of the rows of q_t.
        rows, transposed: whether q, and whether q_t is wanted.

    Raises:
        ValueError: a dimension that 16 does not divide, another dtype, nothing wanted, or no CUDA device.
    """
    check(x, dtype, rows, transposed)
    check_runnable(quantize_blocks_kernel, x)
    return only(Quantized(*quantize_blocks_op(x.contiguous(), dtype, square, rows, transposed)), rows, transposed)
