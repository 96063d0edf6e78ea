"""SwiGLU's backward fused with quantization to fp8: dgate | dup and recomputed z, with one scale each.

Formula: ``swiglu.py``, rounded to the dtype of its operands, then quantized as in ``quantize_reference.py``. The bits
are those of ``swiglu_backward_`` followed by ``quantize``.

Method: with one scale, absmax must be known before anything is quantized, and dgate | dup is one of the largest tensors
of a block. Instead of being stored in bf16 it is computed twice, which costs a few instructions: the first pass finds
absmax, the second quantizes, in tiles of four rows per thread as in ``quantize.py``. The absmax of z is known from
forward.

The first pass computes a bound first: no gradient of a block exceeds its largest dz times its steepest slope, which
forward recorded (``swiglu.py``). If the bound does not exceed the largest magnitude so far, gate and up are not read.
Skipping changes no bit of the result.

Traffic in bytes of bf16 per element of z: the first pass reads 2 and, where the bound does not exclude it, 4 more; the
second reads 6 and writes 4, and 1 for z; 13 to 17 in all, where three launches that store bf16 between them move 23
(without z 12 to 16, and 18). At 16,384 x 18,944 on an H200 the first pass takes 0.19 to 0.20 ms, and 0.47 if it reads
everything; the second moves 3.8 TB/s, a copy 4.2 (LOG.md).

Limits: as ``quantize.py``; z is returned only transposed, as the weight gradient reads it.

    slot = torch.zeros((), device=dz.device)
    dgate_up, z = swiglu_backward_quantize(dz, gate_up, slopes, slot, torch.float8_e4m3fn, z_absmax=z_absmax)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.absmax import check_absmax, magnitude_bits, raise_absmax
from cs336_systems.kernels.assembly import fp8_bytes, packed, rounded
from cs336_systems.kernels.launching import ceil_div, check_alike, check_runnable, launch
from cs336_systems.kernels.quantize import (
    LANES,
    Tile,
    empty_pair,
    format_of,
    launch_tiles,
    load_lanes,
    scales_of,
    store_transposed,
)
from cs336_systems.kernels.quantize_reference import Quantized, check, only
from cs336_systems.kernels.swiglu import BLOCK_F, BLOCK_ROWS, check_slopes, gradients_of, own_block

BLOCKS = 2
"""Forward's blocks whose gradients are bounded, and perhaps computed, together. One takes 0.96 to 1.11 of the time of
two, four take 1.09 to 1.28."""
SLACK = tl.constexpr(1 + 2.0**-20)
"""Factor by which a bound exceeds its exact value, in case the compiler rounds a slope differently in backward."""
INFINITY = tl.constexpr(0x7F800000)
"""The bits of infinity in fp32."""
TILE = Tile(128, 64, 8)
"""Half of ``quantize.TILE_TRANSPOSED``, as three matrices are held in registers. Of seventeen tiles the fastest at
18,944 columns, and 0.8 % slower than 64 x 64 at 8,960; 64 x 128 with four warps takes 11 % longer."""


@triton.jit
def swiglu_backward_absmax_kernel(
    dz, gate_up, slopes, absmax, n_rows, d_ff,
    BLOCKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Raise absmax to the largest magnitude of dgate | dup, in gate_up's dtype; a program has BLOCKS forward blocks."""
    at, gate_at, inside = own_block(n_rows, d_ff, BLOCKS * BLOCK_ROWS, BLOCK_F)
    g = tl.load(dz + at, mask=inside, other=0.0).to(tl.float32)
    n_columns = tl.cdiv(d_ff, BLOCK_F)
    blocks = tl.program_id(0) // n_columns * BLOCKS + tl.arange(0, BLOCKS)
    exists = blocks < tl.cdiv(n_rows, BLOCK_ROWS)
    slope = tl.load(slopes + blocks * n_columns + tl.program_id(0) % n_columns, mask=exists, other=0.0)
    largest = tl.max(tl.reshape(magnitude_bits(g), (BLOCKS, BLOCK_ROWS * BLOCK_F)), axis=1)
    bound = largest.to(tl.float32, bitcast=True) * slope * SLACK
    so_far = tl.load(absmax.to(tl.pointer_type(tl.int32)), volatile=True)
    bits = tl.max(magnitude_bits(bound.to(gate_up.dtype.element_ty).to(tl.float32)), axis=0)
    if bits > so_far or bits >= INFINITY:  # infinity times zero is NaN, whose bits are larger
        gate = tl.load(gate_up + gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gate_at + d_ff, mask=inside, other=0.0).to(tl.float32)
        dgate, dup, _ = gradients_of(gate, up, g)
        raise_absmax(absmax, tl.maximum(magnitude_bits(dgate), magnitude_bits(dup)), gate_up.dtype.element_ty)


@triton.jit
def quantized_bytes(x, scale, ROUNDED_TO: tl.constexpr, DTYPE: tl.constexpr):
    """The fp8 bytes of fp32 x, first rounded to ROUNDED_TO, then multiplied by its scale."""
    return fp8_bytes(rounded(x, ROUNDED_TO) * scale, DTYPE)


@triton.jit
def swiglu_backward_quantize_kernel(
    dz, gate_up, absmax, z_absmax, q, q_t, z_t, inverse_scale, z_inverse_scale, n_rows, d_ff,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, Z_DTYPE: tl.constexpr, Z_LARGEST: tl.constexpr,
    TRANSPOSED: tl.constexpr, WITH_PRODUCT: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """q (n_rows, 2 d_ff) of dgate | dup, q_t (2 d_ff, n_rows) and z_t (d_ff, n_rows), of contiguous dz and gate_up."""
    n_tiles = tl.cdiv(d_ff, TILE_COLUMNS)
    tile_row, tile_column = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    words = tile_row * (TILE_ROWS // LANES) + tl.arange(0, TILE_ROWS // LANES)
    columns = tile_column * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (words < n_rows // LANES)[:, None] & (columns < d_ff)[None, :]
    row_starts = words.to(tl.int64)[:, None] * (LANES * d_ff)
    gate_at = 2 * row_starts + columns[None, :]
    gates = load_lanes(gate_up, gate_at, 2 * d_ff, inside)
    ups = load_lanes(gate_up + d_ff, gate_at, 2 * d_ff, inside)
    dzs = load_lanes(dz, row_starts + columns[None, :], d_ff, inside)
    scale, inverse = scales_of(tl.load(absmax), LARGEST)
    tl.store(inverse_scale, inverse, mask=tl.program_id(0) == 0)
    if WITH_PRODUCT:
        z_scale, z_inverse = scales_of(tl.load(z_absmax), Z_LARGEST)
        tl.store(z_inverse_scale, z_inverse, mask=tl.program_id(0) == 0)
    gate_word = tl.zeros((TILE_ROWS // LANES, TILE_COLUMNS), tl.uint32)
    up_word, z_word = gate_word, gate_word
    ROUNDED_TO: tl.constexpr = gate_up.dtype.element_ty
    for lane in tl.static_range(LANES):
        gate, up = gates[lane].to(tl.float32), ups[lane].to(tl.float32)
        dgate, dup, product = gradients_of(gate, up, dzs[lane].to(tl.float32))
        gate_bytes = quantized_bytes(dgate, scale, ROUNDED_TO, DTYPE)
        up_bytes = quantized_bytes(dup, scale, ROUNDED_TO, DTYPE)
        at = gate_at + lane * (2 * d_ff)
        tl.store(q + at, gate_bytes.to(DTYPE, bitcast=True), mask=inside)
        tl.store(q + at + d_ff, up_bytes.to(DTYPE, bitcast=True), mask=inside)
        if TRANSPOSED:
            gate_word, up_word = packed(gate_word, gate_bytes, lane), packed(up_word, up_bytes, lane)
        if WITH_PRODUCT:
            z_word = packed(z_word, quantized_bytes(product, z_scale, ROUNDED_TO, Z_DTYPE), lane)
    if TRANSPOSED:
        store_transposed(q_t, gate_word, words, columns, inside, n_rows)
        store_transposed(q_t, up_word, words, columns + d_ff, inside, n_rows)
    if WITH_PRODUCT:
        store_transposed(z_t, z_word, words, columns, inside, n_rows)


def swiglu_backward_quantize(
    dz_RF: Tensor,
    gate_up_R2F: Tensor,
    slopes: Tensor,
    absmax: Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool = True,
    z_absmax: Tensor | None = None,
    z_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Quantized, Quantized | None]:
    """dgate | dup (R, 2F) in fp8, row-major and transposed, and z (R, F) in fp8, transposed, or None.

    Args:
        dz_RF: gradient of z; fp32, bf16 or fp16, like gate_up; each is copied if not contiguous.
        slopes: of gate_up, as ``swiglu_forward`` records them.
        absmax: () in fp32, zeroed by the caller; becomes the largest magnitude of dgate | dup.
        transposed: whether to return dgate | dup transposed, too.
        z_absmax: the largest magnitude of z, () in fp32, to return z; None for no z.

    Raises:
        ValueError: as ``swiglu_backward_`` and ``quantize``.
    """
    if dz_RF.dim() != 2 or gate_up_R2F.shape != (dz_RF.shape[0], 2 * dz_RF.shape[1]):
        raise ValueError(f"dz {tuple(dz_RF.shape)} does not match the halves of gate_up {tuple(gate_up_R2F.shape)}")
    check_alike(dz=dz_RF, gate_up=gate_up_R2F)
    check_slopes(slopes, gate_up_R2F)
    check(dz_RF, dtype, True, transposed)
    check(dz_RF, z_dtype, True, transposed)
    for each in (absmax, z_absmax):
        check_absmax(each, dz_RF)
    check_runnable(swiglu_backward_quantize_kernel, dz_RF)
    dz, gate_up, (n_rows, d_ff), device = dz_RF.contiguous(), gate_up_R2F.contiguous(), dz_RF.shape, dz_RF.device
    with_z = z_absmax is not None
    (q, q_t), (_, z_t) = empty_pair(gate_up, dtype, True, transposed), empty_pair(dz, z_dtype, False, with_z)
    inverse, z_inverse = torch.empty((), device=device), torch.empty(() if with_z else (0,), device=device)
    launch(
        swiglu_backward_absmax_kernel,
        (ceil_div(n_rows, BLOCKS * BLOCK_ROWS) * ceil_div(d_ff, BLOCK_F),),
        *(dz, gate_up, slopes, absmax, n_rows, d_ff),
        BLOCKS=BLOCKS,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_F=BLOCK_F,
    )
    launch_tiles(
        swiglu_backward_quantize_kernel,
        TILE,
        dz.shape,
        *(dz, gate_up, absmax, absmax if z_absmax is None else z_absmax, q, q_t, z_t, inverse, z_inverse),
        **format_of(dtype),
        **{f"Z_{name}": value for name, value in format_of(z_dtype).items()},
        TRANSPOSED=transposed,
        WITH_PRODUCT=with_z,
    )
    gradients = only(Quantized(q, q_t, inverse, inverse), True, transposed)
    return gradients, None if z_absmax is None else Quantized(None, z_t, None, z_inverse)
