"""Matmuls on Hopper: y = x W^T, and gate | up with SwiGLU in the same launch.

    gate | up = x W^T,   product = silu(gate) * up

Method. A persistent kernel: one program per multiprocessor loops over tiles of the result. One warp copies tiles of
both operands into a ring in shared memory, with 64 elements of the reduction dimension, 48 KB, per slot. Two warpgroups
multiply half of the tile's rows each (wgmma, fp32 sums) and store them, half of the columns at a time, while the next
tile's operands arrive. Tiles are ordered column by column within bands of rows, so that what the running programs read
stays in the L2 cache.

With SwiGLU, an adapter's term (``lora_reference.py``) is one more step of the reduction, over [h of gates | h of ups]
and B. For ups, B is read from ``rank`` columns left of its first. Copies fill with zeros left and right of a matrix, so
each half is multiplied by its own h. The sum is rounded once.

Under continuous matmuls a GPU is bound by its power limit: an H200 runs this at 1.4 of its 2.0 GHz (LOG.md). The kernel
is used for weights of the shapes in ``FASTER``, torch for all others (``matmul.py``). Its results were bit-identical to
cuBLAS's in all 35 comparisons.

Limits: bf16 and fp16; compute capability 9.0; rows that begin at multiples of 16 bytes; with SwiGLU, a multiple of 256
columns in the result; at least two tiles per multiprocessor. Torch computes all other matmuls.

    launch_product(x, weight, y)                 # y (R, N) = x (R, K) W^T
    launch_product(x, weight, gate_up, z)        # gate_up (R, 2F) = x W^T, and its product z (R, F)
    launch_product(x, weight, gate_up, z, low)   # gate_up = x W^T + low

Shape legend: R rows, K and N columns of a weight and its rows, F d_ff.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from cs336_systems.kernels.assembly import sigmoid_of
from cs336_systems.kernels.copy_engine import ALIGNMENT_BYTES, Ring, add_barriers, aggregate, can_be_copied, descriptor
from cs336_systems.kernels.launching import MAX_REMEMBERED, Prepared, ceil_div, n_multiprocessors
from cs336_systems.kernels.lora_reference import LowRank

DEPTH = gl.constexpr(64)
"""Elements of the reduction dimension per step: 128 bytes, the widest row that shared memory swizzles."""
BAND = gl.constexpr(2048)
"""Rows of the result that are computed together and so share the weight's tiles in the L2 cache."""
ROWS = gl.constexpr(64)
"""Rows of a tile that each of the two consumers computes."""
COLUMNS = gl.constexpr(256)
"""Columns of a tile, stored one half at a time; with SwiGLU the left half holds gates, the right half ups."""


FASTER = frozenset(
    {  # gate | up
        (9728, 896, True),  # Qwen2.5 0.5B: 0.93 to 1.11 x, whole steps 0.5 % faster
        (17920, 1536, True),  # 1.5B: 0.958
        (22016, 2048, True),  # 3B: 0.969
        (37888, 3584, True),  # 7B: 0.960 at 4,096 rows, 0.998 at 16,384
        (28672, 4096, True),  # Llama 3 8B: 0.986
        # heads, by 2,048 rows
        (151936, 896, False),  # 0.951
        (151936, 1536, False),  # 0.976
        (151936, 2048, False),  # 0.979
        (152064, 3584, False),  # 0.974
        (128256, 4096, False),  # 0.977
        (151936, 4096, False),  # 0.976
    }
)
"""(N, K, whether SwiGLU is fused) of weights for which this kernel is faster on an H200. Beside each, its time divided
by torch's, which includes a separate SwiGLU pass: medians of four rounds. Others tie or lose: q | k | v 0.98 to 1.09,
and gradients of SwiGLU's output with the weight transposed before, 1.02 to 1.5. Leaderboard-8b's gate | up (22016,
4096) takes 0.987 on one GPU, but on two GPUs forward takes 1,433 ms with it and q | k | v by this kernel, 1,413
without: perhaps because programs with a fixed share of the tiles wait for those that NCCL delays."""


class Buffering(NamedTuple):
    """The parts of shared memory: 48 KB per stage, and 32 KB for both consumers' buffers."""

    stages: int
    buffers: int
    """Buffers per consumer for halves of its part that are being stored."""


PLAIN, GATED = Buffering(3, 2), Buffering(4, 1)
"""Prototypes at 32,768 x 9728 x 896: plain 761 TFLOP/s, with SwiGLU's setting 731; SwiGLU 645, with plain's 613."""


@aggregate
class Tiles:
    """The shape of a result, which is computed tile by tile."""

    n_rows: gl.tensor
    n_columns: gl.tensor

    @gluon.jit
    def n_tiles(self):
        return gl.cdiv(self.n_rows, 2 * ROWS) * gl.cdiv(self.n_columns, COLUMNS)

    @gluon.jit
    def tile(self, i):
        """(first row, first column); band by band of rows, and in a band column by column."""
        in_band: gl.constexpr = BAND // (2 * ROWS)
        first = i // (in_band * gl.cdiv(self.n_columns, COLUMNS)) * in_band
        within = i - first * gl.cdiv(self.n_columns, COLUMNS)
        here = gl.minimum(gl.cdiv(self.n_rows, 2 * ROWS) - first, in_band)
        return (first + within % here) * (2 * ROWS), within // here * COLUMNS


@aggregate
class Work:
    """The tiles of a matmul's result, and the shared memory in which they are computed."""

    tiles: Tiles
    depth: gl.tensor
    rank: gl.tensor
    """The rank of each half of the columns; 0 if no low-rank matrix is added."""
    left: gl.shared_memory_descriptor
    """The left operand's tiles: for each slot of the ring, the first consumer's part and the second's."""
    right: Ring
    out: gl.shared_memory_descriptor
    SWIGLU: gl.constexpr
    BUFFERS: gl.constexpr


@gluon.jit
def product_producer(work, left, right, h, factor):
    """One warp copies both operands' parts for each step of each tile, and then those of low rank."""
    BYTES: gl.constexpr = (2 * ROWS + COLUMNS) * DEPTH * 2
    HALF: gl.constexpr = COLUMNS // 2
    step = 0
    for i in range(gl.program_id(0), work.tiles.n_tiles(), gl.num_programs(0)):
        row, column = work.tiles.tile(i)
        for k in range(0, work.depth, DEPTH):
            full = work.right.begin(step, BYTES)
            slot = work.right.slot(step)
            for who in gl.static_range(2):
                part = row + who * ROWS
                tma.async_copy_global_to_shared(left, [part, k], full, work.left.index(2 * slot + who))
            tile = work.right.tiles.index(slot)
            if work.SWIGLU:  # half of the columns are gates, the other half their ups
                first = column // 2
                tma.async_copy_global_to_shared(right, [first, k], full, tile.slice(0, HALF, 0))
                up = work.tiles.n_columns // 2 + first
                tma.async_copy_global_to_shared(right, [up, k], full, tile.slice(HALF, HALF, 0))
            else:
                tma.async_copy_global_to_shared(right, [column, k], full, tile)
            step += 1
        if work.SWIGLU:
            for k in range(0, 2 * work.rank, DEPTH):
                full = work.right.begin(step, BYTES)
                slot = work.right.slot(step)
                for who in gl.static_range(2):
                    tma.async_copy_global_to_shared(h, [row + who * ROWS, k], full, work.left.index(2 * slot + who))
                tile = work.right.tiles.index(slot)
                first = column // 2
                tma.async_copy_global_to_shared(factor, [first, k], full, tile.slice(0, HALF, 0))
                up = work.tiles.n_columns // 2 + first
                tma.async_copy_global_to_shared(factor, [up, k - work.rank], full, tile.slice(HALF, HALF, 0))
                step += 1


@gluon.jit
def multiply(work, acc, step, WHO: gl.constexpr, FIRST: gl.constexpr):
    """Start a step's matmul, added to the sum, and wait for the previous step's."""
    right = work.right.wait(step).permute((1, 0))
    left = work.left.index(2 * work.right.slot(step) + WHO)
    acc = warpgroup_mma(left, right, acc, use_acc=not FIRST, is_async=True)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def halves(acc, LAYOUT: gl.constexpr):
    """Split a block into the left and the right half of its columns."""
    left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def send(work, descriptor, values, row, column, n_sent, WHO: gl.constexpr):
    """Store through shared memory; returns the number of stores so far."""
    buffer = work.out.index(WHO * work.BUFFERS + n_sent % work.BUFFERS)
    tma.store_wait(work.BUFFERS - 1)  # the buffer's last contents have been stored
    gl.thread_barrier()  # several warps send parts, and each waits for its own
    buffer.store(values)
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [row, column], buffer)
    return n_sent + 1


@gluon.jit
def product_consumer(work, out, product, WHO: gl.constexpr):
    """One warpgroup computes half of the rows of each tile."""
    HALF: gl.constexpr = COLUMNS // 2
    dtype: gl.constexpr = work.out.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    step = 0
    n_sent = 0
    for i in range(gl.program_id(0), work.tiles.n_tiles(), gl.num_programs(0)):
        row, column = work.tiles.tile(i)
        row += WHO * ROWS
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        acc = multiply(work, acc, step, WHO, True)
        step += 1
        for _ in range(DEPTH, gl.cdiv(work.depth, DEPTH) * DEPTH + 2 * work.rank, DEPTH):
            acc = multiply(work, acc, step, WHO, False)
            work.right.release(step - 1)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        work.right.release(step - 1)
        left, right = halves(acc, half_layout)
        if work.SWIGLU:
            gate, up = left.to(dtype), right.to(dtype)
            column = column // 2
            n_sent = send(work, out, gate, row, column, n_sent, WHO)
            n_sent = send(work, out, up, row, work.tiles.n_columns // 2 + column, n_sent, WHO)
            wide = gate.to(gl.float32)
            z = wide * sigmoid_of(wide) * up.to(gl.float32)
            n_sent = send(work, product, z.to(dtype), row, column, n_sent, WHO)
        else:
            n_sent = send(work, out, left.to(dtype), row, column, n_sent, WHO)
            n_sent = send(work, out, right.to(dtype), row, column + HALF, n_sent, WHO)
    tma.store_wait(0)


@gluon.jit
def product_kernel(
    left, right, out, product, h, factor, n_rows, n_columns, depth, rank,
    SWIGLU: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """out (n_rows, n_columns) and, with SWIGLU, product (n_rows, n_columns / 2); adds h factor^T if rank is not 0."""
    dtype: gl.constexpr = left.dtype
    HALF: gl.constexpr = COLUMNS // 2
    left_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], dtype)
    right_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DEPTH], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], dtype)
    work = Work(
        Tiles(n_rows, n_columns), depth, rank,
        gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, DEPTH], left_layout),
        add_barriers(gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, DEPTH], right_layout), STAGES, 2),
        gl.allocate_shared_memory(dtype, [2 * BUFFERS, ROWS, HALF], out_layout),
        SWIGLU, BUFFERS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (product_consumer, (work, out, product, 0)),
            (product_consumer, (work, out, product, 1)),
            (product_producer, (work, left, right, h, factor)),
        ],
        [4, 1],
        [240, 24],
    )


@lru_cache(maxsize=MAX_REMEMBERED)
def _prepared(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    swiglu: bool,
) -> Prepared | None:
    """A launch that takes the addresses of x, weight, out, SwiGLU's product, h and B; None if they are not supported.

    Without a low-rank part, x and the weight are passed as h and B.
    """
    tensors = list(zip(shapes, strides, dtypes, strict=True))
    (n_rows, depth), (n_columns, _) = shapes[:2]
    n_tiles = ceil_div(n_rows, 2 * ROWS.value) * ceil_div(n_columns, COLUMNS.value)
    results = (n_rows, n_columns), (n_rows, n_columns // 2 if swiglu else n_columns)
    rank = shapes[5][1] if shapes[4:] != shapes[:2] else 0
    served = shapes[1][1] == depth and shapes[2:4] == results
    served = served and (not rank or (swiglu and shapes[4:] == ((n_rows, 2 * rank), (n_columns, rank))))
    served = served and set(dtypes) in ({torch.bfloat16}, {torch.float16})
    served = served and all(can_be_copied(*tensor) for tensor in tensors)
    served = served and depth >= DEPTH.value and not (swiglu and n_columns % COLUMNS.value)
    if not (served and n_tiles >= 2 * n_multiprocessors(device)):
        return None
    half = COLUMNS.value // 2
    boxes = (
        (ROWS.value, DEPTH.value),
        (half if swiglu else COLUMNS.value, DEPTH.value),
        (ROWS.value, half),
        (ROWS.value, half),
        (ROWS.value, DEPTH.value),
        (half, DEPTH.value),
    )
    buffering = GATED if swiglu else PLAIN
    return Prepared(
        product_kernel,
        n_multiprocessors(device),
        *(descriptor(*tensor, box) for tensor, box in zip(tensors, boxes, strict=True)),
        n_rows,
        n_columns,
        depth,
        rank,
        SWIGLU=swiglu,
        STAGES=buffering.stages,
        BUFFERS=buffering.buffers,
        num_warps=4,
        maxnreg=168,
    )


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device has compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def launch_product(
    x: Tensor, weight: Tensor, out: Tensor, product: Tensor | None = None, low: LowRank | None = None
) -> bool:
    """Fill out and, with SwiGLU, its product; do nothing and return False if the kernel does not support these.

    Args:
        low: a low-rank matrix of two parts that is added to out; only with SwiGLU.
    """
    if not is_hopper(x.device):
        return False
    h, factor = (x, weight) if low is None else low[:2]
    tensors = x, weight, out, out if product is None else product, h, factor
    shapes, strides = tuple(tuple(t.shape) for t in tensors), tuple(t.stride() for t in tensors)
    run = _prepared(shapes, strides, tuple(t.dtype for t in tensors), x.device, product is not None)
    addresses = [t.data_ptr() for t in tensors]
    if run is None or any(address % ALIGNMENT_BYTES for address in addresses):
        return False
    with torch.cuda.device_of(x):
        run(triton.runtime.driver.active.get_current_stream(x.get_device()), *addresses)
    return True
