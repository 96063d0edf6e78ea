"""A weight's gradient on Hopper, added to the one before: gradient += dy^T x, read and written once.

Method. That of ``products.py``, whose tiles this shares: one program per multiprocessor goes through tiles of the
result, a warp copies tiles of both operands to shared memory, and two warpgroups multiply. Both operands lie with the
sum's dimension as their rows, so that shared memory holds them as they come and wgmma reads them transposed. Some steps
before a tile ends, the same warp has copied what the gradient holds there to the buffers from which the sum will leave;
the warpgroups add to it in fp32 and round once. So reading hides behind products, as writing does.

Limits: all three in bf16 or all in fp16, compute capability 9.0, rows that begin at multiples of 16 bytes, sums of at
least 1,024, and enough tiles to fill the device twice; other tensors go to torch.

    add_weight_gradient_(gradient, dy, x)     # gradient (N, K) += dy (R, N)^T x (R, K)

Shape legend: R rows, N and K rows of a weight and its columns.
"""

# mypy: allow-untyped-defs
# A kernel's arguments are Triton values; the host functions below are typed.

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.kernels.products import COLUMNS, DEPTH, ROWS, Tiles, halves, is_hopper, one_of_two_bytes
from cs336_systems.operators.copy_engine import ALIGNMENT_BYTES, can_be_copied, descriptor
from cs336_systems.operators.launching import MAX_REMEMBERED, ceil_div, n_multiprocessors
from cs336_systems.operators.prepared import Prepared
from cs336_systems.operators.registration import operator
from cs336_systems.operators.rings import Ring, add_barriers, aggregate

STAGES = 3
"""48 KB each, beside 64 KB for what a tile of the gradient held and shall hold."""
EARLY = gl.constexpr(8)
"""Steps before the end of a tile at which what the gradient holds is asked for: microseconds."""
LEAST_STEPS = 16


@aggregate
class GradientWork:
    """Tiles of a gradient, and the shared memory in which they are made."""

    tiles: Tiles
    depth: gl.tensor
    left: gl.shared_memory_descriptor
    """For each slot of the ring, the part of the first consumer and that of the second."""
    right: Ring
    sums: gl.shared_memory_descriptor
    """For each consumer, the halves of its part's columns."""
    held: gl.shared_memory_descriptor
    """Barriers, one of each consumer: what the gradient holds is there."""
    sent: gl.shared_memory_descriptor
    """And: what the last tile left there has gone."""


@gluon.jit
def turn(i):
    """How many tiles this program has gone through before."""
    return i // gl.num_programs(0)


@gluon.jit
def gradient_producer(work, left, right, gradient):
    """One warp: for each step of each tile, what it takes of both operands; and what the gradient holds."""
    BYTES: gl.constexpr = (2 * ROWS + COLUMNS) * DEPTH * 2
    HALF: gl.constexpr = COLUMNS // 2
    early = (gl.cdiv(work.depth, DEPTH) - EARLY) * DEPTH
    step = 0
    for i in range(gl.program_id(0), work.tiles.n_tiles(), gl.num_programs(0)):
        row, column = work.tiles.tile(i)
        for k in range(0, work.depth, DEPTH):
            full = work.right.begin(step, BYTES)
            slot = work.right.slot(step)
            for who in gl.static_range(2):
                part = row + who * ROWS
                tma.async_copy_global_to_shared(left, [k, part], full, work.left.index(2 * slot + who))
            tma.async_copy_global_to_shared(right, [k, column], full, work.right.tiles.index(slot))
            step += 1
            if k == early:
                for who in gl.static_range(2):
                    held = work.held.index(who)
                    mbarrier.wait(work.sent.index(who), turn(i) & 1)
                    mbarrier.expect(held, ROWS * COLUMNS * 2)
                    for half in gl.static_range(2):
                        at = [row + who * ROWS, column + half * HALF]
                        tma.async_copy_global_to_shared(gradient, at, held, work.sums.index(2 * who + half))


@gluon.jit
def multiply_transposed(work, acc, step, WHO: gl.constexpr, FIRST: gl.constexpr):
    """Start adding the product of a step, and wait for the one before."""
    right = work.right.wait(step)
    left = work.left.index(2 * work.right.slot(step) + WHO).permute((1, 0))
    acc = warpgroup_mma(left, right, acc, use_acc=not FIRST, is_async=True)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def add_and_send(work, gradient, values, row, column, which):
    """What the buffer holds and these values, rounded once, on their way to the gradient."""
    buffer = work.sums.index(which)
    total = (buffer.load(values.type.layout).to(gl.float32) + values).to(work.sums.dtype)
    gl.thread_barrier()  # all of it has been read
    buffer.store(total)
    fence_async_shared()
    tma.async_copy_shared_to_global(gradient, [row, column], buffer)


@gluon.jit
def gradient_consumer(work, gradient, WHO: gl.constexpr):
    """One warpgroup: half of the rows of each tile."""
    HALF: gl.constexpr = COLUMNS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    step = 0
    for i in range(gl.program_id(0), work.tiles.n_tiles(), gl.num_programs(0)):
        row, column = work.tiles.tile(i)
        row += WHO * ROWS
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        acc = multiply_transposed(work, acc, step, WHO, True)
        step += 1
        tma.store_wait(0)  # the last tile has left the buffers
        gl.thread_barrier()  # several warps sent parts of it, and each waits for its own
        mbarrier.arrive(work.sent.index(WHO), count=1)
        for _ in range(DEPTH, work.depth, DEPTH):
            acc = multiply_transposed(work, acc, step, WHO, False)
            work.right.release(step - 1)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        work.right.release(step - 1)
        left, right = halves(acc, half_layout)
        mbarrier.wait(work.held.index(WHO), turn(i) & 1)
        add_and_send(work, gradient, left, row, column, 2 * WHO)
        add_and_send(work, gradient, right, row, column + HALF, 2 * WHO + 1)
    tma.store_wait(0)


@gluon.jit
def weight_gradient_kernel(left, right, gradient, n_rows, n_columns, depth, STAGES: gl.constexpr):
    """gradient (n_rows, n_columns) += left (depth, n_rows)^T right (depth, n_columns)."""
    dtype: gl.constexpr = left.dtype
    HALF: gl.constexpr = COLUMNS // 2
    left_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DEPTH, ROWS], dtype)
    right_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DEPTH, COLUMNS], dtype)
    sums_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], dtype)
    held = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(held.index(who), count=1)
        mbarrier.init(sent.index(who), count=1)
    work = GradientWork(
        Tiles(n_rows, n_columns), depth,
        gl.allocate_shared_memory(dtype, [2 * STAGES, DEPTH, ROWS], left_layout),
        add_barriers(gl.allocate_shared_memory(dtype, [STAGES, DEPTH, COLUMNS], right_layout), STAGES, 2),
        gl.allocate_shared_memory(dtype, [4, ROWS, HALF], sums_layout),
        held, sent,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (gradient_consumer, (work, gradient, 0)),
            (gradient_consumer, (work, gradient, 1)),
            (gradient_producer, (work, left, right, gradient)),
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
) -> Prepared | None:
    """For the addresses of dy, x and the gradient; None if the kernel does not serve these."""
    tensors = list(zip(shapes, strides, dtypes, strict=True))
    depth, (n_rows, n_columns) = shapes[0][0], shapes[2]
    n_tiles = ceil_div(n_rows, 2 * ROWS.value) * ceil_div(n_columns, COLUMNS.value)
    served = shapes[:2] == ((depth, n_rows), (depth, n_columns)) and one_of_two_bytes(dtypes)
    served = served and all(can_be_copied(*tensor) for tensor in tensors)
    served = served and depth >= LEAST_STEPS * DEPTH.value
    if not (served and n_tiles >= 2 * n_multiprocessors(device)):
        return None
    boxes = ((DEPTH.value, ROWS.value), (DEPTH.value, COLUMNS.value), (ROWS.value, COLUMNS.value // 2))
    return Prepared(
        weight_gradient_kernel,
        n_multiprocessors(device),
        *(descriptor(*tensor, box) for tensor, box in zip(tensors, boxes, strict=True)),
        n_rows,
        n_columns,
        depth,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=168,
    )


def launch_weight_gradient(gradient: Tensor, dy: Tensor, x: Tensor) -> bool:
    """Add to the gradient; False, and nothing is done, where the kernel does not serve."""
    if not is_hopper(dy.device):
        return False
    tensors = dy, x, gradient
    shapes, strides = tuple(tuple(t.shape) for t in tensors), tuple(t.stride() for t in tensors)
    run = _prepared(shapes, strides, tuple(t.dtype for t in tensors), dy.device)
    addresses = [t.data_ptr() for t in tensors]
    if run is None or any(address % ALIGNMENT_BYTES for address in addresses):
        return False
    with torch.cuda.device_of(dy):
        run(triton.runtime.driver.active.get_current_stream(dy.get_device()), *addresses)
    return True


@operator("add_weight_gradient_", lambda gradient, dy, x: None, mutates=("gradient",))
def add_weight_gradient_(gradient: Tensor, dy: Tensor, x: Tensor) -> None:
    """gradient (N, K) += dy (R, N) transposed times x (R, K); by torch where the kernel does not serve."""
    if not launch_weight_gradient(gradient, dy, x):
        gradient.addmm_(dy.T, x)
