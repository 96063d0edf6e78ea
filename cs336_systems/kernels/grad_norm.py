"""The joint L2 norm of many tensors; the result stays on the device, as clipping needs (``training/clipping.py``).

    norm  = sqrt(sum_t sum_i t[i]^2)

How. Two launches for any number of tensors, of either dtype. In the first, a program sums the squares of a chunk of one
tensor (``tensor_table.py``) in fp32, each lane its own elements and then the lanes in pairs, and writes one fp32
partial sum. The second is a single program, which overlaps the first and waits for its end; it adds the partial sums in
fp64, in a fixed order, and takes the root. So the result has the same bits every time. Any NaN or inf gives a norm of
NaN or inf. With AdamW's ``grad_scale`` gradients are never written back.

Traffic: every tensor once, and 4 bytes per 65,536 elements twice.

Limits: bf16 and fp32. Squares are taken in fp32: an element beyond 1.8e19 gives inf, one below 1e-19 is lost. The sum
of a chunk adds at most 16 squares per lane and 12 levels of pairs: its relative error is below 30 x 2^-24 = 1.8e-6,
that of the norm below 0.9e-6 plus half an ulp.

    norm = grad_norm([p.grad for p in parameters])          # fp32, shape ()
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336_systems.kernels.launching import launch, needs_other_device, overlaps
from cs336_systems.kernels.tensor_table import TensorTable, is_aligned, is_dense

CHUNK = 65536
"""Elements per program: 8 billion elements leave 122,000 partial sums, which one program adds in about 30 us."""
BLOCK, WARPS = 4096, 8
"""16 fp32 registers for each of 256 threads."""
FINAL_BLOCK = 4096

COLUMNS = tl.constexpr(5)
ADDRESS = tl.constexpr(2)
IS_BF16 = tl.constexpr(3)
ALIGNED = tl.constexpr(4)


@triton.jit
def chunk_sum_of_squares(address, n, n_whole, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The fp32 sum over n elements of DTYPE at an address; the first n_whole lie in aligned whole blocks."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_whole, BLOCK):
        x = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        block = tl.load(x + start + lanes).to(tl.float32)
        total += block * block
    for start in range(n_whole, n, BLOCK):
        block = tl.load(address.to(tl.pointer_type(DTYPE)) + start + lanes, mask=start + lanes < n, other=0.0)
        total += block.to(tl.float32) * block.to(tl.float32)
    return tl.sum(total)


@triton.jit
def sum_of_squares_kernel(rows, owners, partials, CHUNK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """partials[i] (fp32) of chunk i."""
    if OVERLAP:
        gdc_launch_dependents()
    program = tl.program_id(0)
    row = rows + tl.load(owners + program) * COLUMNS
    start = (program - tl.load(row + 1)) * CHUNK
    n = tl.minimum(tl.load(row) - start, CHUNK).to(tl.int32)
    n_whole = tl.where(tl.load(row + ALIGNED) != 0, n // BLOCK * BLOCK, 0)
    address = tl.load(row + ADDRESS)
    if tl.load(row + IS_BF16) != 0:
        total = chunk_sum_of_squares(address + start * 2, n, n_whole, tl.bfloat16, BLOCK)
    else:
        total = chunk_sum_of_squares(address + start * 4, n, n_whole, tl.float32, BLOCK)
    tl.store(partials + program, total)


@triton.jit
def root_of_sum_kernel(partials, norm, n_partials, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """norm () of n_partials fp32 sums, in fp64 until the last rounding; one program."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    if OVERLAP:
        gdc_wait()
    for start in range(0, n_partials, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        total += tl.load(partials + lanes, mask=lanes < n_partials, other=0.0).to(tl.float64)
    tl.store(norm, tl.sqrt(tl.sum(total)).to(tl.float32))


def grad_norm(tensors: Sequence[Tensor], table: TensorTable | None = None) -> Tensor:
    """The L2 norm of all elements of all tensors, fp32 of shape () on their device; two launches, no waiting.

    Args:
        tensors: bf16 or fp32, any sizes, dense in memory; at least one, all on one device.
        table: from ``norm_table``, kept between calls with the same tensors: their addresses are then copied to the
            device once.

    Raises:
        ValueError: there are no tensors, or one is of another dtype, on another device, not dense, or where Triton
            does not run.
    """
    return norm_of_sums([sums_of_squares(tensors, table or norm_table())])


def sums_of_squares(tensors: Sequence[Tensor], table: TensorTable) -> Tensor:
    """The sum of squares of each chunk of each tensor, (n,) in fp32; arguments and errors as in ``grad_norm``."""
    if not tensors:
        raise ValueError("grad_norm needs at least one tensor, got none")
    device = tensors[0].device
    if needs_other_device(sum_of_squares_kernel, device):
        raise ValueError(f"grad_norm needs tensors on a CUDA device, got {device}")
    for i, x in enumerate(tensors):
        if x.dtype not in (torch.bfloat16, torch.float32) or x.device != device or not is_dense(x):
            got = f"{x.dtype} on {x.device} with strides {x.stride()}" if x.layout == torch.strided else str(x.layout)
            raise ValueError(f"grad_norm takes dense bf16 or fp32 tensors on one device, {device}; tensor {i} is {got}")
    rows = [(x.numel(), x.data_ptr(), int(x.dtype == torch.bfloat16), int(is_aligned(x))) for x in tensors]
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, which may be another
        table.describe(rows, device)
        partials = torch.empty(table.n_chunks, dtype=torch.float32, device=device)
        if table.n_chunks:
            launch(
                sum_of_squares_kernel,
                (table.n_chunks,),
                *(table.rows, table.owners, partials),
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                OVERLAP=overlaps(root_of_sum_kernel),
                num_warps=WARPS,
            )
    return partials


def norm_of_sums(sums: Sequence[Tensor]) -> Tensor:
    """The norm () in fp32 of tensors whose ``sums_of_squares`` are given, one result for each call."""
    partials = sums[0] if len(sums) == 1 else torch.cat(list(sums))
    norm = torch.empty((), dtype=torch.float32, device=partials.device)
    overlap = overlaps(root_of_sum_kernel)
    launch(
        root_of_sum_kernel,
        (1,),
        *(partials, norm, partials.numel()),
        BLOCK=FINAL_BLOCK,
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )
    return norm


def norm_table() -> TensorTable:
    """An empty table for ``grad_norm`` to keep between calls."""
    return TensorTable(CHUNK)
