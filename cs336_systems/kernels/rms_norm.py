"""RMSNorm in Triton, forward and backward, with or without a preceding residual add.

Formula, for each row of x (R, D) or of x + branch, with a gain (D); dy is the gradient of y, and dresidual that of x
from the residual path:

    rstd          = 1 / sqrt(mean_d x^2 + eps)
    y             = x * rstd * gain
    dx            = rstd * (dy * gain - x * rstd^2 * mean_d(dy * gain * x)) + dresidual
    dgain         = sum_r dy * x * rstd

Everything is computed in fp32, and rounded where ``model.ops.rms_norm`` rounds: x + branch (the new residual), x * rstd
*before* it is multiplied by the gain, and y. Backward rounds each of its results once, and uses the unrounded x * rstd.

Method. A program holds whole rows in registers, so that each element is read or written once.

* forward: one program per block of rows.
* backward: one to three programs per multiprocessor loop over all blocks of rows, while the next blocks are copied to
  shared memory (``num_stages``). Each program accumulates dgain in registers and writes its sum once, into its row of
  an fp32 buffer (programs, D). A second kernel adds up these rows; it is launched while the first still runs and waits
  for its end. There are no atomics, so the bits are the same in every run on one device.
* absmax, if passed, is raised to the largest magnitude of y or of dx (``absmax.py``).
* rows longer than ``MAX_BLOCK_D`` are read twice, the second time most likely from the L2 cache, and backward keeps its
  sums for dgain in its row of the buffer.

Traffic, in passes over (R, D): forward 2 (reads x, writes y), with the add 4 (reads x and branch, writes residual and
y); backward 3 (reads x and dy, writes dx), with dresidual 4. In addition, rstd takes 4 bytes per row, and dgain's
buffer is written and read once: 8 D bytes per program. With some ten FLOPs per element, it is memory-bound.

Limits: fp32, bf16, fp16, one dtype for all tensors except rstd. Each D is compiled separately.

    y = rms_norm(x, weight, eps)    # ModelOps' signature, for autograd
    y_RD, rstd_R = rms_norm_forward(x_RD, gain_D, eps)    # for a hand-written backward
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language.extra.cuda import gdc_launch_dependents

from cs336_systems.kernels.absmax import check_absmax, largest_of_threads, magnitude_bits, raise_absmax
from cs336_systems.kernels.column_sums import sum_rows, sum_rows_kernel
from cs336_systems.kernels.launching import (
    ceil_div,
    check_alike,
    check_runnable,
    launch,
    n_multiprocessors,
    next_power_of_2,
    overlaps,
)

MAX_BLOCK_D = 8192
ALLOW_FMA = False
"""The compiler may fuse x0^2 + x1^2 differently after an add; rstd must have the same bits with and without the add."""


@triton.jit
def _block_at(start, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns start to start + BLOCK_D of some rows: offsets from the first row, and from the gain's first element."""
    # A whole block, although its rows are equal, so that the gain is loaded by the threads that hold x.
    columns = start + tl.broadcast_to(tl.arange(0, BLOCK_D)[None, :], (BLOCK_ROWS, BLOCK_D))
    return tl.arange(0, BLOCK_ROWS)[:, None] * D + columns, columns


@triton.jit
def _load(pointers, inside):
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_sum(x, branch, inside, ADD: tl.constexpr):
    """x, or x + branch rounded to x's dtype, in fp32."""
    total = _load(x, inside)
    if ADD:
        total = (total + _load(branch, inside)).to(x.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def _inverse_rms(squares, eps, D: tl.constexpr):
    """rstd (BLOCK_ROWS, 1)."""
    return tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / D + eps)


@triton.jit
def normed(total, inverse_rms, gain_block, DTYPE: tl.constexpr):
    """y in fp32, before it is rounded to DTYPE."""
    return (total * inverse_rms).to(DTYPE).to(tl.float32) * gain_block


@triton.jit
def _store_output(
    total, inverse_rms, gain_block, residual, y, inside, ADD: tl.constexpr, STORE_Y: tl.constexpr, DTYPE: tl.constexpr
):
    """Returns the magnitude bits of y."""
    output = normed(total, inverse_rms, gain_block, DTYPE)
    if STORE_Y:
        tl.store(y, output, mask=inside)  # a store rounds to the tensor's dtype
    if ADD:
        tl.store(residual, total, mask=inside)
    return tl.where(inside, magnitude_bits(output), 0)  # with eps = 0, NaN elsewhere


@triton.jit
def rms_norm_forward_kernel(
    x, branch, gain, residual, y, rstd, absmax, n_rows, eps,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr, STORE_Y: tl.constexpr,
    WITH_ABSMAX: tl.constexpr,
):  # fmt: skip
    """rstd (n_rows) and, with STORE_Y and ADD, y and residual of contiguous (n_rows, D).

    Program i owns rows i * BLOCK_ROWS and on.
    """
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    first = first_row * D  # may pass 2^31; what is inside a block does not
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    exists = first_row + rows < n_rows
    DTYPE: tl.constexpr = x.dtype.element_ty
    if D <= BLOCK_D:
        at, columns = _block_at(0, D, BLOCK_ROWS, BLOCK_D)
        inside = exists & (columns < D)
        total = _load_sum(x + first + at, branch + first + at, inside, ADD)
        gain_block = _load(gain + columns, columns < D)
        inverse_rms = _inverse_rms(total * total, eps, D)
        residual_at, y_at = residual + first + at, y + first + at
        bits = _store_output(total, inverse_rms, gain_block, residual_at, y_at, inside, ADD, STORE_Y, DTYPE)
    else:
        squares = tl.zeros((BLOCK_ROWS, BLOCK_D), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            at, columns = _block_at(start, D, BLOCK_ROWS, BLOCK_D)
            total = _load_sum(x + first + at, branch + first + at, exists & (columns < D), ADD)
            squares += total * total
        inverse_rms = _inverse_rms(squares, eps, D)
        bits = tl.zeros((BLOCK_ROWS, BLOCK_D), dtype=tl.int32)
        for start in range(0, D, BLOCK_D):
            at, columns = _block_at(start, D, BLOCK_ROWS, BLOCK_D)
            inside = exists & (columns < D)
            total = _load_sum(x + first + at, branch + first + at, inside, ADD)
            gain_block = _load(gain + columns, columns < D)
            residual_at, y_at = residual + first + at, y + first + at
            block_bits = _store_output(total, inverse_rms, gain_block, residual_at, y_at, inside, ADD, STORE_Y, DTYPE)
            bits = tl.maximum(bits, block_bits)
    tl.store(rstd + first_row + rows, inverse_rms, mask=exists)
    if WITH_ABSMAX:
        raise_absmax(absmax, bits, DTYPE)


@triton.jit
def _statistics(products, rstd, exists, D: tl.constexpr):
    """rstd and rstd^2 mean_d(dy gain x), both (BLOCK_ROWS, 1)."""
    inverse_rms = _load(rstd, exists)
    return inverse_rms, inverse_rms * inverse_rms * (tl.sum(products, axis=1, keep_dims=True) / D)


@triton.jit
def _store_dx(dn, x_block, inverse_rms, along_x, dresidual, dx, inside, HAS_DRESIDUAL: tl.constexpr):
    """Returns the largest magnitude bits of dx."""
    gradient = inverse_rms * (dn - x_block * along_x)
    if HAS_DRESIDUAL:
        gradient += _load(dresidual, inside)
    tl.store(dx, gradient, mask=inside)
    return largest_of_threads(tl.where(inside, magnitude_bits(gradient), 0))


@triton.jit
def rms_norm_backward_kernel(
    dy, x, gain, rstd, dresidual, dx, partial_dgain, absmax, n_rows,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DRESIDUAL: tl.constexpr,
    WITH_ABSMAX: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dx (n_rows, D) and this program's row of the fp32 partial_dgain (programs, D); all contiguous."""
    if OVERLAP:
        gdc_launch_dependents()
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    partial_dgain += program.to(tl.int64) * D
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    largest = largest_of_threads(tl.zeros((BLOCK_ROWS, BLOCK_D), dtype=tl.int32))
    if D <= BLOCK_D:
        at, columns = _block_at(0, D, BLOCK_ROWS, BLOCK_D)
        gain_block = _load(gain + columns, columns < D)
        dgain = tl.zeros((BLOCK_ROWS, BLOCK_D), dtype=tl.float32)
        for block in tl.range(program, n_blocks, n_programs, num_stages=STAGES):
            first_row = tl.cast(block, tl.int64) * BLOCK_ROWS
            first, exists = first_row * D, first_row + rows < n_rows
            inside = exists & (columns < D)
            x_block, dy_block = _load(x + first + at, inside), _load(dy + first + at, inside)
            dn = dy_block * gain_block
            inverse_rms, along_x = _statistics(dn * x_block, rstd + first_row + rows, exists, D)
            residual_at, dx_at = dresidual + first + at, dx + first + at
            bits = _store_dx(dn, x_block, inverse_rms, along_x, residual_at, dx_at, inside, HAS_DRESIDUAL)
            largest = tl.maximum(largest, bits)
            dgain += dy_block * (x_block * inverse_rms)
        existing = tl.arange(0, BLOCK_D)
        tl.store(partial_dgain + existing, tl.sum(dgain, axis=0), mask=existing < D)
    else:
        for block in range(program, n_blocks, n_programs):
            first_row = tl.cast(block, tl.int64) * BLOCK_ROWS
            first, exists = first_row * D, first_row + rows < n_rows
            products = tl.zeros((BLOCK_ROWS, BLOCK_D), dtype=tl.float32)
            for start in range(0, D, BLOCK_D):
                at, columns = _block_at(start, D, BLOCK_ROWS, BLOCK_D)
                inside = exists & (columns < D)
                x_block, dy_block = _load(x + first + at, inside), _load(dy + first + at, inside)
                products += dy_block * _load(gain + columns, inside) * x_block
            inverse_rms, along_x = _statistics(products, rstd + first_row + rows, exists, D)
            for start in range(0, D, BLOCK_D):
                at, columns = _block_at(start, D, BLOCK_ROWS, BLOCK_D)
                inside = exists & (columns < D)
                x_block, dy_block = _load(x + first + at, inside), _load(dy + first + at, inside)
                dn = dy_block * _load(gain + columns, inside)
                residual_at, dx_at = dresidual + first + at, dx + first + at
                bits = _store_dx(dn, x_block, inverse_rms, along_x, residual_at, dx_at, inside, HAS_DRESIDUAL)
                largest = tl.maximum(largest, bits)
                dgain = _load(partial_dgain + columns, inside & (block > program)) + dy_block * (x_block * inverse_rms)
                tl.store(partial_dgain + columns, dgain, mask=inside)
    if WITH_ABSMAX:
        raise_absmax(absmax, largest, dx.dtype.element_ty)


class Tile(NamedTuple):
    """The block that a program holds, in forward and in backward."""

    block_rows: int
    block_d: int
    num_warps: int
    n_programs: int
    """Programs of backward per multiprocessor."""
    stages: int
    """Stages of backward's loop in 2-byte dtypes: the block in work and those being loaded."""
    stages_alone: int
    """The same without a residual gradient to read."""


def tile_for(d: int) -> Tile:
    """A tile with 16 elements per thread, or 32 for the longest rows; the fastest on an H200 (LOG.md)."""
    block_d = min(MAX_BLOCK_D, next_power_of_2(d))
    if block_d > 2048:
        # Five: 3584 82 -> 88 % of a copy, 4096 87.0 -> 87.7; with the residual 91.0 -> 90.1 and 91.7 -> 90.5.
        return Tile(1, block_d, 8, n_programs=1, stages=4, stages_alone=5 if block_d == 4096 else 4)
    block_rows = min(32, 2048 // block_d)
    return Tile(block_rows, block_d, max(1, block_rows * block_d // 512), n_programs=3, stages=4, stages_alone=4)


def launch_forward(
    x_RD: Tensor,
    branch_RD: Tensor | None,
    gain_D: Tensor,
    eps: float,
    absmax: Tensor | None = None,
    *,
    store_y: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(residual, y, rstd); residual is x without a branch, and y is x if y is not stored."""
    check_absmax(absmax, x_RD)
    n_rows, d = x_RD.shape
    x, gain = x_RD.contiguous(), gain_D.contiguous()
    branch, residual = (x, x) if branch_RD is None else (branch_RD.contiguous(), torch.empty_like(x))
    y, rstd = torch.empty_like(x) if store_y else x, torch.empty(n_rows, dtype=torch.float32, device=x.device)
    if x.numel():
        block_rows, block_d, num_warps, *_ = tile_for(d)
        launch(
            rms_norm_forward_kernel,
            (ceil_div(n_rows, block_rows),),
            *(x, branch, gain, residual, y, rstd, x if absmax is None else absmax, n_rows, eps),
            D=d,
            BLOCK_ROWS=block_rows,
            BLOCK_D=block_d,
            ADD=branch_RD is not None,
            STORE_Y=store_y,
            WITH_ABSMAX=absmax is not None,
            num_warps=num_warps,
            enable_fp_fusion=ALLOW_FMA,
        )
    return residual, y, rstd


def rms_norm_forward(x_RD: Tensor, gain_D: Tensor, eps: float, absmax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y (R, D) in x's dtype, rstd (R) in fp32).

    Args:
        absmax: one fp32 element, which is raised to the largest magnitude of y.
    """
    _, y, rstd = launch_forward(x_RD, None, gain_D, eps, absmax)
    return y, rstd


def add_rms_norm_forward(
    x_RD: Tensor, branch_RD: Tensor, gain_D: Tensor, eps: float, absmax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(residual = x + branch, its norm y, both (R, D) in x's dtype, rstd (R) in fp32); absmax is raised to y's."""
    return launch_forward(x_RD, branch_RD, gain_D, eps, absmax)


def rms_norm_backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    gain_D: Tensor,
    rstd_R: Tensor,
    dresidual_RD: Tensor | None = None,
    absmax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx (R, D) in x's dtype, dgain (D) in the gain's); x is the residual if a branch was added.

    Args:
        rstd_R: from forward.
        dresidual_RD: another gradient of x, to be added.
        absmax: one fp32 element, which is raised to the largest magnitude of dx.
    """
    check_absmax(absmax, x_RD)
    n_rows, d = x_RD.shape
    dy, x, gain = dy_RD.contiguous(), x_RD.contiguous(), gain_D.contiguous()
    dresidual = x if dresidual_RD is None else dresidual_RD.contiguous()
    if not x.numel():
        return torch.empty_like(x), torch.zeros_like(gain)
    block_rows, block_d, num_warps, n_programs, *stages = tile_for(d)
    n_programs *= n_multiprocessors(x.device)
    n_programs = min(ceil_div(n_rows, block_rows), n_programs)
    overlap = overlaps(sum_rows_kernel)
    dx, dgain = torch.empty_like(x), torch.empty_like(gain)
    partial_dgain = torch.empty(n_programs, d, dtype=torch.float32, device=x.device)
    launch(
        rms_norm_backward_kernel,
        (n_programs,),
        *(dy, x, gain, rstd_R.contiguous(), dresidual, dx, partial_dgain, x if absmax is None else absmax, n_rows),
        D=d,
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_d,
        HAS_DRESIDUAL=dresidual_RD is not None,
        WITH_ABSMAX=absmax is not None,
        # The same number of bytes in flight for every dtype.
        STAGES=max(2, 2 * stages[dresidual_RD is None] // x.element_size()),
        OVERLAP=overlap,
        num_warps=num_warps,
        enable_fp_fusion=ALLOW_FMA,
    )
    sum_rows(partial_dgain, dgain, overlap=overlap)
    return dx, dgain


class RMSNorm(torch.autograd.Function):
    """``RMSNorm.apply(x, branch, weight, eps)``: the kernels with autograd, without checks.

    Returns y or, if branch is not None, (residual, y).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows = math.prod(x.shape[:-1]), x.shape[-1]
        branch_RD = None if branch is None else branch.reshape(rows)
        residual_RD, y_RD, rstd_R = launch_forward(x.reshape(rows), branch_RD, weight, eps)
        ctx.save_for_backward(residual_RD, weight, rstd_R)
        ctx.set_materialize_grads(False)
        y = y_RD.view(x.shape)
        return y if branch is None else (residual_RD.view(x.shape), y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        dresidual, dy = arriving if len(arriving) == 2 else (None, *arriving)
        if dy is None:
            return dresidual, dresidual, None, None
        residual_RD, weight, rstd_R = ctx.saved_tensors
        dresidual_RD = None if dresidual is None else dresidual.reshape(residual_RD.shape)
        dx_RD, dgain = rms_norm_backward(dy.reshape(residual_RD.shape), residual_RD, weight, rstd_R, dresidual_RD)
        dx = dx_RD.view(dy.shape)
        return dx, dx if len(arriving) == 2 else None, dgain, None


def check(x: Tensor, weight: Tensor, **others: Tensor) -> None:
    """Raises ValueError, one sentence, unless the kernels support x (..., D) and weight (D), and others match x."""
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not match the last dimension of x {tuple(x.shape)}")
    for name, other in others.items():
        if other.shape != x.shape:
            raise ValueError(f"{name} {tuple(other.shape)} does not match x {tuple(x.shape)}")
    check_alike(x=x, weight=weight, **others)
    check_runnable(rms_norm_forward_kernel, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x (..., D), weight (D) -> (..., D) in x's dtype.

    Any strides; rows that are not contiguous are copied.

    Raises:
        ValueError: the shapes do not match, the dtypes or devices differ, or the kernels do not support them.
    """
    check(x, weight)
    return RMSNorm.apply(x, None, weight, eps)


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + branch, its RMSNorm), both (..., D) in x's dtype, for x and branch (..., D); otherwise as ``rms_norm``."""
    check(x, weight, branch=branch)
    return RMSNorm.apply(x, branch, weight, eps)
