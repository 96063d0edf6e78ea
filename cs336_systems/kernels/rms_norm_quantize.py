"""RMSNorm fused with quantization to fp8 with one scale; y is stored only in fp8.

Formula: ``rms_norm.py``, rounded to the dtype of x, then quantized as in ``quantize_reference.py``. The bits are those
of ``rms_norm_forward`` followed by ``quantize``.

Method: with one scale, absmax must be known before anything is quantized. So forward's kernel first
computes rstd, the largest magnitude and, if a branch is added, the residual, without storing y. Then x is read again,
and y is computed and quantized in tiles of four rows per thread, as in ``quantize.py``. Backward, which reads y
transposed, has both statistics and needs only the second part.

Traffic per element of bf16, plain or transposed: forward reads 4 bytes and writes 1, whereas two launches that store y
in between move 7 bytes; recomputation in backward moves 3, instead of 7.

Limits: as ``rms_norm.py`` and ``quantize.py``.

    slot = torch.zeros((), device=x.device)
    residual, rstd = add_rms_norm_absmax(x, branch, gain, eps, slot)
    quantized = rms_norm_quantize(residual, gain, rstd, slot, torch.float8_e4m3fn)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.absmax import check_absmax
from cs336_systems.kernels.assembly import fp8_bytes, packed
from cs336_systems.kernels.launching import check_runnable
from cs336_systems.kernels.quantize import (
    LANES,
    TILE,
    TILE_TRANSPOSED,
    empty_pair,
    format_of,
    launch_tiles,
    load_tile,
    scales_of,
    store_transposed,
)
from cs336_systems.kernels.quantize_reference import Quantized, check, only
from cs336_systems.kernels.rms_norm import check as check_norm
from cs336_systems.kernels.rms_norm import launch_forward, normed


@triton.jit
def load_lanes_of_rows(x, words, n_rows):
    """Load four vectors, each of every fourth row."""
    inside = words < n_rows // LANES
    return (
        tl.load(x + LANES * words, mask=inside, other=0.0)[:, None],
        tl.load(x + LANES * words + 1, mask=inside, other=0.0)[:, None],
        tl.load(x + LANES * words + 2, mask=inside, other=0.0)[:, None],
        tl.load(x + LANES * words + 3, mask=inside, other=0.0)[:, None],
    )


@triton.jit
def rms_norm_quantize_kernel(
    x, gain, rstd, absmax, q, q_t, inverse_scale, n_rows, width,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """q (n_rows, width) and q_t (width, n_rows) of the norm of contiguous x."""
    n_tiles = tl.cdiv(width, TILE_COLUMNS)
    tile_row, tile_column = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    blocks, words, columns, inside, at = load_tile(x, tile_row, tile_column, n_rows, width, TILE_ROWS, TILE_COLUMNS)
    gains = tl.load(gain + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    inverse_rms = load_lanes_of_rows(rstd, words, n_rows)
    scale, inverse = scales_of(tl.load(absmax), LARGEST)
    tl.store(inverse_scale, inverse, mask=tl.program_id(0) == 0)
    word = tl.zeros((TILE_ROWS // LANES, TILE_COLUMNS), tl.uint32)
    ROUNDED_TO: tl.constexpr = x.dtype.element_ty
    for lane in tl.static_range(LANES):
        y = normed(blocks[lane].to(tl.float32), inverse_rms[lane], gains, ROUNDED_TO)
        quantized = fp8_bytes(y.to(ROUNDED_TO).to(tl.float32) * scale, DTYPE)
        if ROWS:
            tl.store(q + at + lane * width, quantized.to(DTYPE, bitcast=True), mask=inside)
        if TRANSPOSED:
            word = packed(word, quantized, lane)
    if TRANSPOSED:
        store_transposed(q_t, word, words, columns, inside, n_rows)


def rms_norm_quantize(
    x_RD: Tensor,
    gain_D: Tensor,
    rstd_R: Tensor,
    absmax: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    transposed: bool = False,
) -> Quantized:
    """RMSNorm of x (R, D) in fp8, row-major, transposed, or both, in one pass.

    Args:
        x_RD: fp32, bf16 or fp16, like the gain; copied if not contiguous.
        rstd_R: in fp32, from the same kernels.
        absmax: the largest magnitude of the norm, () in fp32.

    Raises:
        ValueError: as ``rms_norm`` and ``quantize``, or rstd or absmax has another shape or dtype.
    """
    check_norm(x_RD, gain_D)
    check(x_RD, dtype, rows, transposed)
    check_absmax(absmax, x_RD)
    if (rstd_R.shape, rstd_R.dtype, rstd_R.device) != (x_RD.shape[:1], torch.float32, x_RD.device):
        got = f"{rstd_R.dtype} of shape {tuple(rstd_R.shape)} on {rstd_R.device}"
        raise ValueError(f"rstd must be float32 of shape {tuple(x_RD.shape[:1])} on {x_RD.device}, got {got}")
    check_runnable(rms_norm_quantize_kernel, x_RD)
    (q, q_t), inverse = empty_pair(x_RD, dtype, rows, transposed), torch.empty((), device=x_RD.device)
    tensors = x_RD.contiguous(), gain_D.contiguous(), rstd_R.contiguous(), absmax, q, q_t, inverse
    asked, tile = {"ROWS": rows, "TRANSPOSED": transposed}, TILE_TRANSPOSED if transposed else TILE
    launch_tiles(rms_norm_quantize_kernel, tile, x_RD.shape, *tensors, **format_of(dtype), **asked)
    return only(Quantized(q, q_t, inverse, inverse), rows, transposed)


def rms_norm_absmax(x_RD: Tensor, gain_D: Tensor, eps: float, absmax: Tensor) -> Tensor:
    """rstd (R) in fp32.

    Args:
        absmax: one fp32 element, which is raised to the largest magnitude of the norm.
    """
    *_, rstd = launch_forward(x_RD, None, gain_D, eps, absmax, store_y=False)
    return rstd


def add_rms_norm_absmax(
    x_RD: Tensor, branch_RD: Tensor, gain_D: Tensor, eps: float, absmax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(residual = x + branch (R, D) in x's dtype, rstd (R) in fp32).

    Args:
        absmax: one fp32 element, which is raised to the largest magnitude of the residual's norm; None if not needed.
    """
    residual, _, rstd = launch_forward(x_RD, branch_RD, gain_D, eps, absmax, store_y=False)
    return residual, rstd
