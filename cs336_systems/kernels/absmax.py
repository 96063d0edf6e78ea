"""The largest magnitude of a tensor, found by its own kernel or within the kernel that writes the tensor.

    absmax = max |x|

Method: as integers, the bits of non-negative fp32 numbers have the same order as the numbers, with infinity above them
and NaN above infinity. So the maximum is an integer maximum, in registers and then by ``atomic_max`` in memory. It does
not depend on the order of programs, so it is bit-identical in every run, and it keeps NaN. Rounding is monotonic, so
the maximum of a tensor that is rounded to bf16 when it is stored is the rounded maximum.

A kernel that writes a tensor takes ``absmax``, one fp32 element, and raises it to the largest magnitude that it writes.
The caller sets it to zero before, for all tensors of a step at once. Several kernels may raise the same element.

Traffic: reads x once, 2 bytes per bf16 element.

    absmax(x)                            # ()
    row_and_column_absmax(x)             # (T, 1), (1, D)
    rms_norm_forward(x, gain, eps, absmax)    # raises absmax to the largest magnitude of y, in the same pass
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.launching import ceil_div, check_runnable, launch

BLOCK = 8192
WARPS = 8
TILE_ROWS, TILE_COLUMNS = 64, 128


@triton.jit
def magnitude_bits(x):
    """|x| of a block of fp32, as int32 in the same order."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of_threads(bits):
    """The largest of each 8 neighbours, which one thread holds, so that a loop keeps an eighth of the registers."""
    FOLD: tl.constexpr = 8 if bits.numel >= 8 else bits.numel
    return tl.max(tl.reshape(bits, (bits.numel // FOLD, FOLD)), axis=1)


@triton.jit
def raise_absmax(absmax, bits, DTYPE: tl.constexpr):
    """Raise absmax (one fp32 element) to the largest of a block of ``magnitude_bits``, rounded to DTYPE.

    absmax is read first, and the atomic is skipped if it would not raise it: with an atomic in each of SwiGLU's 115,000
    programs the kernel takes 10 % longer on an H200, with the check half a percent. A stale value is smaller, so it
    only costs an unnecessary atomic.
    """
    largest = tl.max(tl.ravel(bits), axis=0).to(tl.float32, bitcast=True).to(DTYPE).to(tl.float32)
    at, own = absmax.to(tl.pointer_type(tl.int32)), magnitude_bits(largest)  # rounding may give a NaN a sign
    tl.atomic_max(at, own, mask=own > tl.load(at, volatile=True), sem="relaxed")


@triton.jit
def absmax_kernel(x, absmax, n, BLOCK: tl.constexpr):
    """absmax (one element, zero before) of n elements; program i reads elements i * BLOCK and on."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    block = tl.load(x + first + at, mask=at < n - first, other=0.0).to(tl.float32)
    raise_absmax(absmax, magnitude_bits(block), tl.float32)


@triton.jit
def row_and_column_absmax_kernel(
    x, row_absmax, column_absmax, n_rows, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    """row_absmax (n_rows) and column_absmax (width), zero before, of contiguous x (n_rows, width); one tile each."""
    n_tiles = tl.cdiv(width, TILE_COLUMNS)
    rows = tl.program_id(0) // n_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(0) % n_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < width)[None, :]
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    bits = magnitude_bits(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
    row_at = (row_absmax + rows).to(tl.pointer_type(tl.int32))
    column_at = (column_absmax + columns).to(tl.pointer_type(tl.int32))
    tl.atomic_max(row_at, tl.max(bits, axis=1), mask=rows < n_rows, sem="relaxed")
    tl.atomic_max(column_at, tl.max(bits, axis=0), mask=columns < width, sem="relaxed")


def absmax(x: Tensor) -> Tensor:
    """The largest magnitude of x of any shape, () in fp32: 0 of an empty tensor, NaN if x holds one.

    Raises:
        ValueError: x is neither fp32, bf16 nor fp16, or there is no CUDA device.
    """
    check_runnable(absmax_kernel, x)
    x, found = x.contiguous(), torch.zeros((), dtype=torch.float32, device=x.device)
    launch(absmax_kernel, (ceil_div(x.numel(), BLOCK),), x, found, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return found


def row_and_column_absmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each row (T, 1) and of each column (1, D) of x (T, D), fp32, in one pass.

    Raises:
        ValueError: as ``absmax``, or x is not a matrix.
    """
    if x.dim() != 2:
        raise ValueError(f"rows and columns are those of a matrix, got {tuple(x.shape)}")
    check_runnable(row_and_column_absmax_kernel, x)
    n_rows, width = x.shape
    rows = torch.zeros(n_rows, 1, dtype=torch.float32, device=x.device)
    columns = torch.zeros(1, width, dtype=torch.float32, device=x.device)
    grid = (ceil_div(n_rows, TILE_ROWS) * ceil_div(width, TILE_COLUMNS),)
    tile = {"TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS}
    launch(row_and_column_absmax_kernel, grid, x.contiguous(), rows, columns, n_rows, width, **tile)
    return rows, columns


def check_absmax(absmax: Tensor | None, x: Tensor) -> None:
    """Raises ValueError unless absmax is None or one fp32 element on the device of x."""
    if absmax is not None and (absmax.numel() != 1 or absmax.dtype != torch.float32 or absmax.device != x.device):
        got = f"{absmax.dtype} of shape {tuple(absmax.shape)} on {absmax.device}"
        raise ValueError(f"absmax must be one float32 element on {x.device}, got {got}")
