"""The sum over the rows of a matrix: the gradient of a bias that was added to each row.

Formula, for x (T, D):

    sums[d] = sum over t of x[t, d]

How. A program adds up, in fp32, the rows of one chunk in one block of columns, several at a time, and writes its sums
to a row of a buffer. ``sum_rows``, which also ends RMSNorm's backward, adds up these rows in one order; it is launched
while the first kernel runs, and waits for its end (``gdc_wait``). No atomics: the same bits every time.

Traffic: reads x once, and writes and reads the buffer, of 4 bytes for 256 elements of x.

Limits: fp32, bf16 and fp16; T D < 2^63. A sum is rounded once, where it is stored.

    column_sums(x)          # (D,)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336_systems.kernels.launching import ceil_div, check_runnable, launch, next_power_of_2, overlaps

CHUNK_ROWS, BLOCK_ROWS, BLOCK_COLUMNS = 256, 32, 128
"""Rows of a chunk, those of them that are loaded at once, and columns of a block: 256 bytes of a row in bf16."""
WARPS, STAGES = 4, 4
"""Each thread has 32 elements of each block, and as many blocks are loaded at once as there are stages."""
SUM_BLOCK, SUM_BLOCK_PARTS = 4096, 512
"""Elements that a program loads at once, and the most rows among them."""


@triton.jit
def column_sums_kernel(
    x, partial_sums, n_rows, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """partial_sums (chunks, D) of contiguous x (n_rows, D); a program for each chunk and block of columns."""
    if OVERLAP:
        gdc_launch_dependents()
    n_blocks = tl.cdiv(D, BLOCK_COLUMNS)
    chunk = tl.program_id(0) // n_blocks
    columns = tl.program_id(0) % n_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    first = tl.cast(chunk, tl.int64) * CHUNK
    rows = tl.arange(0, BLOCK_ROWS)
    at = x + (first + rows)[:, None] * D + columns[None, :]
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in tl.range(0, CHUNK, BLOCK_ROWS, num_stages=STAGES):
        inside = (first + start + rows < n_rows)[:, None] & (columns < D)[None, :]
        sums += tl.load(at + start * D, mask=inside, other=0.0).to(tl.float32)
    tl.store(partial_sums + tl.cast(chunk, tl.int64) * D + columns, tl.sum(sums, axis=0), mask=columns < D)


def column_sums(x_TD: Tensor) -> Tensor:
    """The sum over the rows of x, (D,) in its dtype.

    Raises:
        ValueError: x is no matrix, of another dtype than fp32, bf16 or fp16, or there is no CUDA device.
    """
    if x_TD.dim() != 2:
        raise ValueError(f"column_sums takes a matrix, got one of {x_TD.dim()} dimensions")
    check_runnable(column_sums_kernel, x_TD)
    x, (n_rows, d) = x_TD.contiguous(), x_TD.shape
    sums = x.new_empty(d)
    if not x.numel():
        return sums.zero_()
    n_chunks = ceil_div(n_rows, CHUNK_ROWS)
    partial_sums = torch.empty(n_chunks, d, dtype=torch.float32, device=x.device)
    overlap = overlaps(sum_rows_kernel)
    launch(
        column_sums_kernel,
        (n_chunks * ceil_div(d, BLOCK_COLUMNS),),
        *(x, partial_sums, n_rows),
        D=d,
        CHUNK=CHUNK_ROWS,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        STAGES=STAGES,
        OVERLAP=overlap,
        num_warps=WARPS,
    )
    sum_rows(partial_sums, sums, overlap=overlap)
    return sums


@triton.jit
def sum_rows_kernel(
    parts, total, n_parts, D: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr
):
    """total (D) = the sum over the rows of contiguous parts (n_parts, D); program i owns columns i * BLOCK_D and on."""
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    sums = tl.zeros((BLOCK_PARTS, BLOCK_D), dtype=tl.float32)
    if OVERLAP:
        gdc_wait()
    for start in range(0, n_parts, BLOCK_PARTS):
        rows = start + tl.arange(0, BLOCK_PARTS)[:, None]
        sums += tl.load(parts + rows.to(tl.int64) * D + columns, mask=(rows < n_parts) & (columns < D), other=0.0)
    tl.store(total + columns, tl.sum(sums, axis=0, keep_dims=True), mask=columns < D)


def sum_rows(parts_PD: Tensor, total_D: Tensor, *, overlap: bool) -> None:
    """Write the sum over the rows of fp32 ``parts_PD`` to ``total_D``, of any dtype; both contiguous.

    Args:
        overlap: whether to begin while the kernel before it still runs.
    """
    n_parts, d = parts_PD.shape
    block_parts = min(SUM_BLOCK_PARTS, next_power_of_2(n_parts))
    launch(
        sum_rows_kernel,
        (ceil_div(d, SUM_BLOCK // block_parts),),
        *(parts_PD, total_D, n_parts),
        D=d,
        BLOCK_PARTS=block_parts,
        BLOCK_D=SUM_BLOCK // block_parts,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
