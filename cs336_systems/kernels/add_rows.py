"""Rows are added to the rows of a matrix that ids name: one chunk of tokens' part of an embedding's gradient.

Formula, for rows x (T, D), ids (T) in [0, V) and a gradient (V, D):

    gradient[v]   += sum over t with ids[t] = v of x[t]

How. The ids are sorted, each with the place that it had. The first program of a word's run adds up the run's rows in
fp32, a few at a time and in the order in which they came, and then adds the sum to the gradient, which is rounded once.
No atomics: the same bits every time. Torch's ``index_put_(accumulate=True)`` sorts too, but rounds the gradient after
each row: in bf16 a word that comes every twentieth time then loses what is below 1/256 of the sum so far.

Traffic: reads x once, reads and writes the gradient's rows that are named. A word of n rows takes n / 16 turns of one
program's loop.

Limits: fp32, bf16 and fp16, x and gradient of one dtype; ids out of range are not noticed.

    add_rows_(gradient, ids, x)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.launching import ceil_div, check_runnable, launch, next_power_of_2

BLOCK_ROWS, MAX_BLOCK_D = 16, 256
"""32 fp32 registers for each of 128 threads."""


@triton.jit
def add_rows_kernel(ids, places, x, gradient, n_rows, d, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """gradient (V, d) plus x (n_rows, d); sorted ids and the places that they had (n_rows).

    Each row has a program for each block of columns. Those of the row with which a run begins sum that run.
    """
    n_blocks = tl.cdiv(d, BLOCK_D)
    first = tl.program_id(0) // n_blocks
    word = tl.load(ids + first)
    before = tl.load(ids + first - 1, mask=first > 0, other=-1)
    if word != before:
        columns = tl.program_id(0) % n_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        end = first
        more = 1
        while more != 0:
            rows = end + tl.arange(0, BLOCK_ROWS)
            own = tl.load(ids + rows, mask=rows < n_rows, other=-1) == word
            place = tl.load(places + rows, mask=own, other=0)
            at = x + place[:, None] * d + columns[None, :]
            block = tl.load(at, mask=own[:, None] & (columns[None, :] < d), other=0.0)
            total += tl.sum(block.to(tl.float32), axis=0)
            end += BLOCK_ROWS
            more = tl.min(own.to(tl.int32), axis=0)
        at = gradient + word * d + columns
        tl.store(at, tl.load(at, mask=columns < d).to(tl.float32) + total, mask=columns < d)


def add_rows_(gradient_VD: Tensor, ids_T: Tensor, x_TD: Tensor) -> None:
    """Add to each row ids_T[t] of the gradient the row x_TD[t].

    Args:
        gradient_VD: contiguous, as x_TD is and of its dtype.
        ids_T: int64 in [0, V).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a tensor is not contiguous.
    """
    tensors = {"gradient": gradient_VD, "x": x_TD}
    if x_TD.dim() != 2 or gradient_VD.dim() != 2 or (len(ids_T), gradient_VD.shape[1]) != tuple(x_TD.shape):
        raise ValueError(f"x {tuple(x_TD.shape)} is not ({len(ids_T)}, D) for a gradient {tuple(gradient_VD.shape)}")
    if gradient_VD.dtype != x_TD.dtype or ids_T.dtype != torch.int64:
        raise ValueError(f"a gradient of {gradient_VD.dtype} takes no rows of {x_TD.dtype} by ids of {ids_T.dtype}")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.device != ids_T.device:
            raise ValueError(f"{name} must be contiguous on {ids_T.device}, is on {tensor.device} {tensor.stride()}")
    check_runnable(add_rows_kernel, x_TD)
    n_rows, d = x_TD.shape
    if not n_rows:
        return
    ids, places = torch.sort(ids_T, stable=True)
    block_d = min(MAX_BLOCK_D, next_power_of_2(d))
    launch(
        add_rows_kernel,
        (n_rows * ceil_div(d, block_d),),
        *(ids, places, x_TD, gradient_VD, n_rows, d),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_D=block_d,
    )
