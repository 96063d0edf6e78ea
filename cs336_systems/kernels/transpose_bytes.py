"""The transpose of a matrix of bytes: weights in fp8 that arrived as they lie, and that backward reads the other way.

Method: as in ``quantize.py``. A program holds a tile in registers, of four rows in each thread; the four bytes of a
column become one word of 32 bits, and words are transposed through shared memory. Both sides of memory see 16 bytes of
a thread at a time.

Traffic: reads and writes each byte once.

Limits: eight bits an element; matrices whose dimensions 16 divides, as products in fp8 ask for.

    transpose_bytes(q)          # (D, T) of q (T, D)
"""

# mypy: allow-untyped-defs
# A kernel's arguments are Triton values; the host functions below are typed.

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.assembly import packed
from cs336_systems.kernels.checks import check_device
from cs336_systems.kernels.quantize import LANES, TILE_TRANSPOSED, load_tile, store_transposed
from cs336_systems.kernels.quantize_reference import check_bytes
from cs336_systems.operators.launching import ceil_div, launch
from cs336_systems.operators.registration import operator


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


def _result(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


@operator("transpose_bytes", _result)
def transpose_bytes_op(x: Tensor) -> Tensor:
    """(D, T) of contiguous uint8 x (T, D)."""
    n_rows, width = x.shape
    x_t, tile = _result(x), TILE_TRANSPOSED
    if x.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device, which may be another
            launch(
                transpose_bytes_kernel,
                (ceil_div(n_rows, tile.rows) * ceil_div(width, tile.columns),),
                *(x, x_t, n_rows, width),
                TILE_ROWS=tile.rows,
                TILE_COLUMNS=tile.columns,
                num_warps=tile.num_warps,
            )
    return x_t


def transpose_bytes(q: Tensor) -> Tensor:
    """q (T, D) of eight bits an element, fp8 for example, as (D, T), row-major.

    Raises:
        ValueError: wider elements, no matrix, a dimension that 16 does not divide, or no CUDA device.
    """
    check_bytes(q)
    check_device(transpose_bytes_kernel, q)
    transposed: Tensor = transpose_bytes_op(q.contiguous().view(torch.uint8))
    return transposed.view(q.dtype)
