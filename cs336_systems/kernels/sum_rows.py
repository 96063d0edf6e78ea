"""The second reduction of a backward: sums of a few hundred programs, each in a row of an fp32 buffer, are added up.

Rows are added in one order, without atomics: the same bits in every run. The kernel may be launched while the one that
writes the buffer still runs, if that one allows it (``gdc_launch_dependents``), and then waits for its end.
"""

# mypy: allow-untyped-defs
# A kernel's arguments are Triton values; the host function below is typed.

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from cs336_systems.operators.launching import ceil_div, launch, next_power_of_2

SUM_BLOCK, SUM_BLOCK_PARTS = 4096, 512
"""Elements and, of them, rows at most that a program has under way at once."""


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
        overlap: with the kernel before it.
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
