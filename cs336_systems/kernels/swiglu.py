"""SwiGLU on the halves of one merged matrix (gate | up), the result of one matmul.

Formula (Shazeer 2020, eq. 6), with s = 1 / (1 + exp(-gate)) and the gradient dz that arrives at the output:

    z     = gate s up
    dgate = dz (up (s + gate s (1 - s)))
    dup   = dz gate s

Method: elementwise, one program per block of rows and columns. Only gate_up is kept for backward. The down projection's
weight gradient needs z, so backward, which reads gate and up anyway, can recompute and write it (``with_product``).
``swiglu_backward_`` works in place: it overwrites gate_up with dgate_up and dz with z, so backward needs no further
memory. The same pass optionally computes the absmax of z or of dgate_up (``absmax.py``). Forward can record the
steepest slope of z within each block; the fp8 backward uses it to skip blocks that cannot hold the largest gradient
(``swiglu_quantize.py``). Backward can add an adapter's term to dz as it loads dz (``lora.py``), which saves a pass.

Rounding: everything is computed in fp32 and rounded once. Eager bf16 code also rounds silu(gate), and in backward its
gradient, so results differ from eager ones by a rounding or two, and are more exact.

Traffic in elements per output: forward reads 2 and writes 1; backward reads 3 and writes 2, or 3 with the product.
There are some ten FLOPs per output, so the kernels are memory-bound.

Limits: fp32, bf16 and fp16; no second derivative. Loads of 16 bytes need d_ff to be a multiple of 16.

    z = swiglu(gate_up)                                                 # (..., 2 d_ff) -> (..., d_ff), with autograd
    z = swiglu_forward(gate_up)                                         # by hand
    swiglu_backward_(dz, gate_up, with_product=True)                    # dz is z now, and gate_up is dgate_up

Shape legend: R rows (any leading dimensions), F d_ff; 2F a row's gate followed by its up.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.costs.kept import SLOPES_BLOCK
from cs336_systems.kernels.absmax import check_absmax, magnitude_bits, raise_absmax
from cs336_systems.kernels.assembly import sigmoid_of
from cs336_systems.kernels.launching import ceil_div, check_alike, check_runnable, launch
from cs336_systems.kernels.lora import block_rank, check_low_rank, low_rank_of
from cs336_systems.kernels.lora_reference import LowRank

BLOCK_ROWS, BLOCK_F = SLOPES_BLOCK
"""A warp's 32 loads of 16 bytes are 256 bf16, and 256 divides the d_ff of every model size, of Llama and of Qwen; with
8 rows, each of the 128 threads has two such loads of each matrix in flight."""
LOW_RANK_BLOCK = {"BLOCK_ROWS": 32, "BLOCK_F": 128, "num_warps": 8}
"""The block if a low-rank matrix is added: as many elements per thread, and a rank-16 factor is 4 KB beside 24 KB."""


@triton.jit
def own_block(n_rows, d_ff, BLOCK_ROWS: tl.constexpr, BLOCK_F: tl.constexpr):
    """This program's offsets in (n_rows, d_ff), those of its gates in (n_rows, 2 d_ff), and the mask of both."""
    n_blocks = tl.cdiv(d_ff, BLOCK_F)
    rows = tl.program_id(0) // n_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) % n_blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < d_ff)
    row_starts = rows.to(tl.int64)[:, None] * d_ff  # int64, because offsets pass 2^31 elements
    return row_starts + columns[None, :], 2 * row_starts + columns[None, :], inside


@triton.jit
def slopes_of(gate, up):
    """(z's derivative by gate, its derivative by up, z), all in fp32."""
    sigmoid = sigmoid_of(gate)
    silu = gate * sigmoid
    return up * (sigmoid + silu * (1 - sigmoid)), silu, silu * up


@triton.jit
def gradients_of(gate, up, dz):
    """(dgate, dup, z), all in fp32."""
    by_gate, by_up, product = slopes_of(gate, up)
    return dz * by_gate, dz * by_up, product


@triton.jit
def swiglu_forward_kernel(
    gate_up, z, slopes, absmax, n_rows, d_ff,
    WITH_SLOPES: tl.constexpr, WITH_ABSMAX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """z (n_rows, d_ff) of gate_up (n_rows, 2 d_ff), both contiguous, and the steepest slope in each program's block."""
    at, gate_at, inside = own_block(n_rows, d_ff, BLOCK_ROWS, BLOCK_F)
    gate = tl.load(gate_up + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_at + d_ff, mask=inside, other=0.0).to(tl.float32)
    by_gate, by_up, product = slopes_of(gate, up)
    tl.store(z + at, product, mask=inside)
    if WITH_SLOPES:
        bits = tl.maximum(magnitude_bits(by_gate), magnitude_bits(by_up))
        tl.store(slopes + tl.program_id(0), tl.max(tl.ravel(bits), axis=0).to(tl.float32, bitcast=True))
    if WITH_ABSMAX:
        raise_absmax(absmax, magnitude_bits(product), z.dtype.element_ty)


@triton.jit
def swiglu_backward_kernel(
    dz, gate_up, dgate_up, z, h, factor, absmax, n_rows, d_ff, h_stride, column_stride, rank_stride,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, WITH_PRODUCT: tl.constexpr, WITH_ABSMAX: tl.constexpr,
    IN_PLACE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """dgate_up and z; if IN_PLACE, they overwrite gate_up and dz. If RANK is not 0, h factor^T is added to dz."""
    at, gate_at, inside = own_block(n_rows, d_ff, BLOCK_ROWS, BLOCK_F)
    gate = tl.load(gate_up + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_at + d_ff, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dz + at, mask=inside, other=0.0).to(tl.float32)
    if RANK:
        n_blocks = tl.cdiv(d_ff, BLOCK_F)
        rows = tl.program_id(0) // n_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        columns = tl.program_id(0) % n_blocks * BLOCK_F + tl.arange(0, BLOCK_F)
        g += low_rank_of(
            h, factor, h_stride, column_stride, rank_stride, rows, columns, rows < n_rows, columns < d_ff,
            RANK, BLOCK_RANK,
        )  # fmt: skip
    if IN_PLACE:
        # For rows that are not aligned Triton may give an element's load and its store to different threads.
        tl.debug_barrier()
    dgate, dup, product = gradients_of(gate, up, g)
    tl.store(dgate_up + gate_at, dgate, mask=inside)
    tl.store(dgate_up + gate_at + d_ff, dup, mask=inside)
    if WITH_PRODUCT:
        tl.store(z + at, product, mask=inside)
    if WITH_ABSMAX:
        raise_absmax(absmax, tl.maximum(magnitude_bits(dgate), magnitude_bits(dup)), dgate_up.dtype.element_ty)


def _launch_backward(
    dz: Tensor,
    gate_up: Tensor,
    dgate_up: Tensor,
    z: Tensor,
    absmax: Tensor | None = None,
    low: LowRank | None = None,
    **constants: bool,
) -> None:
    n_rows, d_ff = gate_up.shape[:-1].numel(), gate_up.shape[-1] // 2
    block = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_F": BLOCK_F, "num_warps": 4} if low is None else LOW_RANK_BLOCK
    h, factor = (dz, dz) if low is None else (low.h, low.factor)
    strides = (0, 0, 0) if low is None else (h.stride(0), *factor.stride())
    rank = 0 if low is None else factor.shape[1]
    launch(
        swiglu_backward_kernel,
        (ceil_div(n_rows, block["BLOCK_ROWS"]) * ceil_div(d_ff, block["BLOCK_F"]),),
        *(dz, gate_up, dgate_up, z, h, factor, gate_up if absmax is None else absmax, n_rows, d_ff, *strides),
        RANK=rank,
        BLOCK_RANK=block_rank(rank or 1),
        WITH_ABSMAX=absmax is not None,
        **constants,
        **block,
    )


class SwiGLU(torch.autograd.Function):
    """``SwiGLU.apply(gate_up)``: the kernels with autograd; saves only gate_up."""

    @staticmethod
    def forward(ctx: Any, gate_up_R2F: Tensor) -> Tensor:
        gate_up_R2F = gate_up_R2F.contiguous()
        ctx.save_for_backward(gate_up_R2F)
        return swiglu_forward(gate_up_R2F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz_RF: Tensor) -> Tensor:
        (gate_up,), dz = ctx.saved_tensors, dz_RF.contiguous()
        dgate_up = torch.empty_like(gate_up)
        _launch_backward(dz, gate_up, dgate_up, dz, WITH_PRODUCT=False, IN_PLACE=False)
        return dgate_up


def swiglu(gate_up_R2F: Tensor) -> Tensor:
    """silu(gate) * up (..., d_ff), contiguous, of gate_up (..., 2 d_ff), whose rows are gate followed by up.

    gate_up is copied if it is not contiguous.

    Raises:
        ValueError: the last dimension is odd, the dtype is not fp32, bf16 or fp16, or there is no CUDA device.
    """
    _check(gate_up_R2F)
    return SwiGLU.apply(gate_up_R2F)


def swiglu_forward(
    gate_up_R2F: Tensor, absmax: Tensor | None = None, slopes: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``swiglu`` without autograd.

    Args:
        absmax: one fp32 element, which is raised to the largest magnitude of z.
        slopes: from ``empty_slopes``; filled with the largest magnitudes of z's derivatives.
        out: contiguous memory for z.

    Raises:
        ValueError: as ``swiglu``, or absmax or slopes are invalid.
    """
    _check(gate_up_R2F)
    check_absmax(absmax, gate_up_R2F)
    check_slopes(slopes, gate_up_R2F)
    gate_up = gate_up_R2F.contiguous()
    z = product_like(gate_up) if out is None else out
    n_rows, d_ff = z.shape[:-1].numel(), z.shape[-1]
    launch(
        swiglu_forward_kernel,
        (ceil_div(n_rows, BLOCK_ROWS) * ceil_div(d_ff, BLOCK_F),),
        *(gate_up, z, gate_up if slopes is None else slopes, gate_up if absmax is None else absmax, n_rows, d_ff),
        WITH_SLOPES=slopes is not None,
        WITH_ABSMAX=absmax is not None,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_F=BLOCK_F,
    )
    return z


def product_like(gate_up_R2F: Tensor) -> Tensor:
    """Memory for z."""
    *leading, width = gate_up_R2F.shape
    return torch.empty(*leading, width // 2, dtype=gate_up_R2F.dtype, device=gate_up_R2F.device)


def empty_slopes(gate_up_R2F: Tensor) -> Tensor:
    """Memory for the largest magnitude of z's derivatives in each block of 8 rows and 256 columns of z.

    Its shape is (R / 8, F / 256), rounded up, in fp32; derivatives are those by gate and by up.
    """
    return torch.empty(_blocks_of(gate_up_R2F), dtype=torch.float32, device=gate_up_R2F.device)


def check_slopes(slopes: Tensor | None, gate_up_R2F: Tensor) -> None:
    """Raises ValueError unless slopes are None or have the shape and dtype that ``empty_slopes`` gives."""
    if slopes is None:
        return
    shape, device = _blocks_of(gate_up_R2F), gate_up_R2F.device
    found = tuple(slopes.shape), slopes.dtype, slopes.device
    if found != (shape, torch.float32, device) or not slopes.is_contiguous():
        got = f"{slopes.dtype} of shape {found[0]} and strides {slopes.stride()} on {slopes.device}"
        raise ValueError(f"slopes must be contiguous float32 of shape {shape} on {device}, got {got}")


def _blocks_of(gate_up_R2F: Tensor) -> tuple[int, int]:
    """The number of blocks of z by rows and by columns."""
    n_rows, d_ff = gate_up_R2F.shape[:-1].numel(), gate_up_R2F.shape[-1] // 2
    return ceil_div(n_rows, BLOCK_ROWS), ceil_div(d_ff, BLOCK_F)


def swiglu_backward_(
    dz_RF: Tensor,
    gate_up_R2F: Tensor,
    *,
    with_product: bool,
    absmax: Tensor | None = None,
    low: LowRank | None = None,
) -> None:
    """Overwrite gate_up (..., 2 d_ff) with dgate_up and, if ``with_product``, dz (..., d_ff) with z, in one pass.

    Args:
        dz_RF: the gradient of the output.
        with_product: whether dz becomes z = silu(gate) * up, with the same bits as in forward.
        absmax: one fp32 element, which is raised to the largest magnitude of dgate_up.
        low: a low-rank matrix of one part, which is added to dz first.

    Raises:
        ValueError: as ``swiglu``, dz or low does not match gate_up in shape, dtype or device, or dz or gate_up is not
            contiguous.
    """
    _check(gate_up_R2F, dz_RF)
    check_absmax(absmax, gate_up_R2F)
    for name, x in (("dz", dz_RF), ("gate_up", gate_up_R2F)):
        if not x.is_contiguous():
            raise ValueError(f"{name} is overwritten and must be contiguous, got strides {x.stride()}")
    if low is not None:
        check_low_rank(dz_RF, low, n_parts=1)
    tensors = dz_RF, gate_up_R2F, gate_up_R2F, dz_RF
    _launch_backward(*tensors, absmax, low, WITH_PRODUCT=with_product, IN_PLACE=True)


def _check(gate_up: Tensor, dz: Tensor | None = None) -> None:
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2:
        raise ValueError(f"the last dimension of gate_up holds gate and up alike, got {tuple(gate_up.shape)}")
    if dz is not None:
        if dz.shape != (*gate_up.shape[:-1], gate_up.shape[-1] // 2):
            raise ValueError(f"dz {tuple(dz.shape)} does not match the halves of gate_up {tuple(gate_up.shape)}")
        check_alike(dz=dz, gate_up=gate_up)
    check_runnable(swiglu_forward_kernel, gate_up)
