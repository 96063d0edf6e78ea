"""The weighted sum of each row: a first, small Triton kernel with all techniques of the larger ones.

Formula, for x (rows, d), weight w (d) and the gradient g (rows) that arrives at the output:

    out[r]          = sum_d w[d] x[r, d]
    grad_x[r, d]    = g[r] w[d]
    grad_weight[d]  = sum_r g[r] x[r, d]

How a Triton kernel computes it. A *launch* starts a grid of programs; each learns its own number from
``tl.program_id`` and does its share of the work on *blocks*: small arrays whose sizes are powers of two, known when
the kernel is compiled (``tl.constexpr``). A pointer plus a block of offsets is a block of pointers, and ``tl.load``
fetches them all; a mask says which of them exist, since neither the rows nor d need divide into blocks.

* forward: one program per block of rows; it walks over d, block by block, and keeps its sums in fp32.
* backward: the same rows and the same walk. ``grad_x`` is written where it is computed. ``grad_weight`` sums over rows,
  and so over programs, which cannot wait for each other: each writes its partial sum into its own row of a
  (programs, d) buffer, and a second pass adds those up. The result is the same bits every time; atomic additions would
  save the buffer and lose that.

Traffic: forward reads x once; backward reads x once and writes grad_x once. There are two FLOPs for each element read,
so the bound is memory.

    out = weighted_sum(x, weight)        # x (..., d), weight (d,) -> (...)
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ROWS = 16
BLOCK_D = 256
"""A 16 x 256 block is 32 fp32 registers for each of the 128 threads that Triton gives a program by default."""


@triton.jit
def weighted_sum_forward_kernel(x, weight, out, n_rows, d, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """out (n_rows) for contiguous x (n_rows, d) and weight (d); program i owns rows i * BLOCK_ROWS and on."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # int64, because a row's offset passes 2^31 elements in a tensor that large; one multiplication per row is free.
    x_rows = x + rows.to(tl.int64)[:, None] * d
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for start in range(0, d, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = (rows[:, None] < n_rows) & (columns[None, :] < d)
        x_block = tl.load(x_rows + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        w_block = tl.load(weight + columns, mask=columns < d, other=0.0).to(tl.float32)
        total += tl.sum(x_block * w_block[None, :], axis=1)
    tl.store(out + rows, total, mask=rows < n_rows)  # the store rounds to out's dtype


@triton.jit
def weighted_sum_backward_kernel(
    x, weight, grad_out, grad_x, partial_grad_weight, n_rows, d, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """grad_x (n_rows, d) and this program's row of the fp32 partial_grad_weight (programs, d)."""
    program = tl.program_id(0)
    rows = program * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_offsets = rows.to(tl.int64)[:, None] * d
    g = tl.load(grad_out + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    for start in range(0, d, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = (rows[:, None] < n_rows) & (columns[None, :] < d)
        x_block = tl.load(x + row_offsets + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        w_block = tl.load(weight + columns, mask=columns < d, other=0.0).to(tl.float32)
        tl.store(grad_x + row_offsets + columns[None, :], g[:, None] * w_block[None, :], mask=inside)
        partial = tl.sum(g[:, None] * x_block, axis=0)
        tl.store(partial_grad_weight + program.to(tl.int64) * d + columns, partial, mask=columns < d)


def _block_d(d: int) -> int:
    return min(BLOCK_D, triton.next_power_of_2(d))


class WeightedSum(torch.autograd.Function):
    """``WeightedSum.apply(x, weight)`` for x (..., d) and weight (d,): the kernels, joined to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        n_rows, d = x.shape[:-1].numel(), x.shape[-1]
        x_RD, weight = x.reshape(n_rows, d).contiguous(), weight.contiguous()
        ctx.save_for_backward(x_RD, weight)
        ctx.shape = x.shape
        out = x_RD.new_zeros(n_rows) if d == 0 else x_RD.new_empty(n_rows)
        if x_RD.numel():
            with torch.cuda.device_of(x_RD):  # Triton launches on the current device, which may be another
                weighted_sum_forward_kernel[(triton.cdiv(n_rows, BLOCK_ROWS),)](
                    x_RD, weight, out, n_rows, d, BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=_block_d(d)
                )
        return out.view(x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        x_RD, weight = ctx.saved_tensors
        n_rows, d = x_RD.shape
        programs = triton.cdiv(n_rows, BLOCK_ROWS)
        grad_x, partial = torch.empty_like(x_RD), x_RD.new_empty(programs, d, dtype=torch.float32)
        if x_RD.numel():
            with torch.cuda.device_of(x_RD):
                weighted_sum_backward_kernel[(programs,)](
                    *(x_RD, weight, grad_out.reshape(-1).contiguous(), grad_x, partial, n_rows, d),
                    BLOCK_ROWS=BLOCK_ROWS,
                    BLOCK_D=_block_d(d),
                )
        return grad_x.view(ctx.shape), partial.sum(dim=0).to(weight.dtype)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """sum_d weight[d] x[..., d]: x (..., d), weight (d,) -> (...), in x's dtype, accumulated in fp32.

    Raises:
        ValueError: the shapes do not fit, or the dtypes or devices differ.
    """
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not match the last dimension of x {tuple(x.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        got = f"{x.dtype} on {x.device} and {weight.dtype} on {weight.device}"
        raise ValueError(f"x and weight must share dtype and device, got {got}")
    return WeightedSum.apply(x, weight)
