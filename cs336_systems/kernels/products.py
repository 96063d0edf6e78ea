"""Matrix products of a block on Hopper: y = x W^T, dx = dy W, dW = dy^T x, and what goes with them in one launch.

    y = residual + x W^T;    gate | up = x W^T and silu(gate) * up

Method. One program per multiprocessor goes through tiles of the result. A warp copies tiles of both operands to shared
memory, a ring of 48 KB steps of 64 along the sum; two warpgroups multiply half of the tile's rows each (wgmma, sums in
fp32) and send them to memory, a half of the columns at a time, while the next tile's operands arrive. Tiles go column
by column within bands of rows, so that what the running programs read stays in the L2 cache.

A GPU that multiplies without pause is bound by its power limit: an H200 runs these at 1.4 of its 2.0 GHz, and energy
is what counts (LOG.md). Results are cuBLAS's to the bit where its sums go the same way, 16 products at a time in order.

Limits: bf16 and fp16, compute capability 9.0, rows that begin at multiples of 16 bytes, and enough tiles to fill the
device twice; other tensors go to torch. d_ff must be a multiple of 128 for SwiGLU, or that is a launch of its own.

    product_(y, x, weight)                                # y (R, N) = x W^T
    add_product_(y, residual, x, weight)                  # y = residual + x W^T
    dx = product_backward(dy, weight)                         # (R, N), (N, K) -> (R, K)
    weight_backward_(dweight, dy, x, accumulate=False)   # (R, N), (R, K) -> (N, K)
    z = swiglu_product_(gate_up, x, weight)               # gate_up (R, 2F) = x W^T, and (R, F)

Shape legend: R rows, K and N columns of a weight and its rows, F d_ff.
"""

# mypy: allow-untyped-defs
# A kernel's arguments are Triton values; the host functions below are typed.

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from cs336_systems.kernels.swiglu import _product_like
from cs336_systems.kernels.swiglu import forward_op as swiglu_op
from cs336_systems.operators.copy_engine import ALIGNMENT_BYTES, can_be_copied, descriptor, example
from cs336_systems.operators.launching import MAX_REMEMBERED, ceil_div, n_multiprocessors
from cs336_systems.operators.prepared import Prepared
from cs336_systems.operators.registration import operator
from cs336_systems.operators.rings import Ring, add_barriers, aggregate

DEPTH = gl.constexpr(64)
"""Of one step along the sum: 128 bytes, the widest row that shared memory swizzles."""
LOG2_E = gl.constexpr(1.4426950408889634)
BAND = gl.constexpr(2048)
"""Rows that share a column's tiles of the weight."""


class Tile(NamedTuple):
    """What a program computes at once."""

    rows: int
    """Of each of the two consumers."""
    columns: int
    stages: int
    buffers: int
    """Halves of a consumer's part on their way out."""


WIDE, TALL, GATED = Tile(64, 256, 3, 2), Tile(128, 128, 3, 2), Tile(64, 256, 4, 1)
"""The second where its narrower columns waste less: 896 is 7 x 128, and 3.5 x 256. The third with SwiGLU."""


@aggregate
class Work:
    """The shape of a result, its tiles, and the shared memory in which they are made."""

    n_rows: gl.tensor
    n_columns: gl.tensor
    depth: gl.tensor
    left: gl.shared_memory_descriptor
    """For each slot of the ring, the part of the first consumer and that of the second."""
    right: Ring
    out: gl.shared_memory_descriptor
    LEFT_DOWN: gl.constexpr
    """The sum runs down the columns of the left operand, and not along its rows; so of the right one."""
    RIGHT_DOWN: gl.constexpr
    SWIGLU: gl.constexpr
    ADD: gl.constexpr
    ROWS: gl.constexpr
    COLUMNS: gl.constexpr
    BUFFERS: gl.constexpr

    @gluon.jit
    def n_tiles(self):
        return gl.cdiv(self.n_rows, 2 * self.ROWS) * gl.cdiv(self.n_columns, self.COLUMNS)

    @gluon.jit
    def tile(self, i):
        """(first row, first column); band by band of rows, and in a band column by column."""
        in_band: gl.constexpr = BAND // (2 * self.ROWS)
        first = i // (in_band * gl.cdiv(self.n_columns, self.COLUMNS)) * in_band
        within = i - first * gl.cdiv(self.n_columns, self.COLUMNS)
        here = gl.minimum(gl.cdiv(self.n_rows, 2 * self.ROWS) - first, in_band)
        return (first + within % here) * (2 * self.ROWS), within // here * self.COLUMNS


@gluon.jit
def product_producer(work, left, right):
    """One warp: for each step of each tile, what it takes of both operands."""
    BYTES: gl.constexpr = (2 * work.ROWS + work.COLUMNS) * DEPTH * 2
    HALF: gl.constexpr = work.COLUMNS // 2
    step = 0
    for i in range(gl.program_id(0), work.n_tiles(), gl.num_programs(0)):
        row, column = work.tile(i)
        for k in range(0, work.depth, DEPTH):
            full = work.right.begin(step, BYTES)
            slot = work.right.slot(step)
            for who in gl.static_range(2):
                part = row + who * work.ROWS
                at = [k, part] if work.LEFT_DOWN else [part, k]
                tma.async_copy_global_to_shared(left, at, full, work.left.index(2 * slot + who))
            tile = work.right.tiles.index(slot)
            if work.SWIGLU:  # half of the columns are gates, the others the ups of the same
                first = column // 2
                tma.async_copy_global_to_shared(right, [first, k], full, tile.slice(0, HALF, 0))
                up = work.n_columns // 2 + first
                tma.async_copy_global_to_shared(right, [up, k], full, tile.slice(HALF, HALF, 0))
            else:
                at = [k, column] if work.RIGHT_DOWN else [column, k]
                tma.async_copy_global_to_shared(right, at, full, tile)
            step += 1


@gluon.jit
def multiply(work, acc, step, WHO: gl.constexpr, FIRST: gl.constexpr):
    """Start adding the product of a step, and wait for the one before."""
    right = work.right.wait(step)
    left = work.left.index(2 * work.right.slot(step) + WHO)
    if not work.RIGHT_DOWN:
        right = right.permute((1, 0))
    if work.LEFT_DOWN:
        left = left.permute((1, 0))
    acc = warpgroup_mma(left, right, acc, use_acc=not FIRST, is_async=True)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def halves(acc, LAYOUT: gl.constexpr):
    """The left and the right half of the columns."""
    left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def send(work, descriptor, values, row, column, n_sent, WHO: gl.constexpr):
    """Store through shared memory; returns how many were sent."""
    buffer = work.out.index(WHO * work.BUFFERS + n_sent % work.BUFFERS)
    tma.store_wait(work.BUFFERS - 1)  # what this buffer held has left it
    gl.thread_barrier()  # several warps send parts, and each waits for its own
    buffer.store(values)
    fence_async_shared()
    tma.async_copy_shared_to_global(descriptor, [row, column], buffer)
    return n_sent + 1


@gluon.jit
def load_addend(work, addend, row, column, LAYOUT: gl.constexpr):
    """Half of the columns of a consumer's part, as the warpgroup holds its sums."""
    rows = row + gl.arange(0, work.ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = column + gl.arange(0, work.COLUMNS // 2, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (rows < work.n_rows) & (columns < work.n_columns)
    return gl.load(addend + rows.to(gl.int64) * work.n_columns + columns, mask=inside)


@gluon.jit
def product_consumer(work, out, product, addend, WHO: gl.constexpr):
    """One warpgroup: half of the rows of each tile."""
    HALF: gl.constexpr = work.COLUMNS // 2
    dtype: gl.constexpr = work.out.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, work.COLUMNS, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    step = 0
    n_sent = 0
    for i in range(gl.program_id(0), work.n_tiles(), gl.num_programs(0)):
        row, column = work.tile(i)
        row += WHO * work.ROWS
        acc = gl.zeros([work.ROWS, work.COLUMNS], gl.float32, layout)
        acc = multiply(work, acc, step, WHO, True)
        step += 1
        for _ in range(DEPTH, work.depth, DEPTH):
            acc = multiply(work, acc, step, WHO, False)
            work.right.release(step - 1)
            step += 1
        if work.ADD:
            added = load_addend(work, addend, row, column, half_layout)  # under the last product
        acc = warpgroup_mma_wait(0, (acc,))
        work.right.release(step - 1)
        left, right = halves(acc, half_layout)
        if work.ADD:
            left += added.to(gl.float32)
            right += load_addend(work, addend, row, column + HALF, half_layout).to(gl.float32)
        if work.SWIGLU:
            gate, up = left.to(dtype), right.to(dtype)
            column = column // 2
            n_sent = send(work, out, gate, row, column, n_sent, WHO)
            n_sent = send(work, out, up, row, work.n_columns // 2 + column, n_sent, WHO)
            wide = gate.to(gl.float32)
            silu = wide * (1.0 / (1.0 + gl.exp2(-LOG2_E * wide)))
            n_sent = send(work, product, (silu * up.to(gl.float32)).to(dtype), row, column, n_sent, WHO)
        else:
            n_sent = send(work, out, left.to(dtype), row, column, n_sent, WHO)
            n_sent = send(work, out, right.to(dtype), row, column + HALF, n_sent, WHO)
    tma.store_wait(0)


@gluon.jit
def product_kernel(
    left, right, out, product, addend, n_rows, n_columns, depth,
    LEFT_DOWN: gl.constexpr, RIGHT_DOWN: gl.constexpr, SWIGLU: gl.constexpr, ADD: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """out (n_rows, n_columns), with ADD on top of addend, and with SWIGLU product (n_rows, n_columns / 2)."""
    dtype: gl.constexpr = left.dtype
    of_left: gl.constexpr = [DEPTH, ROWS] if LEFT_DOWN else [ROWS, DEPTH]
    of_right: gl.constexpr = [DEPTH, COLUMNS] if RIGHT_DOWN else [COLUMNS, DEPTH]
    left_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(of_left, dtype)
    right_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(of_right, dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS // 2], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, of_right[0], of_right[1]], right_layout)
    work = Work(
        n_rows, n_columns, depth,
        gl.allocate_shared_memory(dtype, [2 * STAGES, of_left[0], of_left[1]], left_layout),
        add_barriers(tiles, STAGES, 2),
        gl.allocate_shared_memory(dtype, [2 * BUFFERS, ROWS, COLUMNS // 2], out_layout),
        LEFT_DOWN, RIGHT_DOWN, SWIGLU, ADD, ROWS, COLUMNS, BUFFERS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (product_consumer, (work, out, product, addend, 0)),
            (product_consumer, (work, out, product, addend, 1)),
            (product_producer, (work, left, right)),
        ],
        [4, 1],
        [240, 24],
    )


def tile_for(n_columns: int, swiglu: bool) -> Tile:
    """The tile that wastes fewer columns."""
    if swiglu:
        return GATED
    return min((WIDE, TALL), key=lambda tile: -n_columns % tile.columns)


@lru_cache(maxsize=MAX_REMEMBERED)
def _prepared(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    down: tuple[bool, bool],
    swiglu: bool,
    add: bool,
    tile: Tile | None,
) -> Prepared | None:
    """For the addresses of left, right, out, SwiGLU's product and addend; None if the kernel does not serve these."""
    tensors = [(shape, of, dtype) for shape, of in zip(shapes, strides, strict=True)]
    (n_rows, n_columns), depth = shapes[2], shapes[0][0 if down[0] else 1]
    rows, columns, stages, buffers = tile or tile_for(n_columns, swiglu)
    n_tiles = ceil_div(n_rows, 2 * rows) * ceil_div(n_columns, columns)
    served = dtype in (torch.bfloat16, torch.float16) and all(can_be_copied(*tensor) for tensor in tensors)
    served = served and depth >= DEPTH.value and n_tiles >= 2 * n_multiprocessors(device)
    if not served or (swiglu and n_columns % columns):
        return None
    boxes = (rows, DEPTH.value), (columns // (1 + swiglu), DEPTH.value)
    of_left, of_right = (box[::-1] if turned else box for box, turned in zip(boxes, down, strict=True))
    of_out = rows, columns // 2
    return Prepared(
        product_kernel,
        n_multiprocessors(device),
        *(descriptor(*tensor, box) for tensor, box in zip(tensors, (of_left, of_right, of_out, of_out), strict=True)),
        example(dtype),
        n_rows,
        n_columns,
        depth,
        LEFT_DOWN=down[0],
        RIGHT_DOWN=down[1],
        SWIGLU=swiglu,
        ADD=add,
        ROWS=rows,
        COLUMNS=columns,
        STAGES=stages,
        BUFFERS=buffers,
        num_warps=4,
        maxnreg=168,
    )


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def launch_product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    product: Tensor | None = None,
    addend: Tensor | None = None,
    *,
    down: tuple[bool, bool] = (False, False),
    tile: Tile | None = None,
) -> bool:
    """Fill out and, with SwiGLU, its product; False, and nothing is done, where the kernel does not serve.

    Args:
        addend: like out, which it may be.
        down: of each operand, whether the sum runs down its columns, and not along its rows.
        tile: overrides the table's.
    """
    if not _is_hopper(left.device):
        return False
    tensors = left, right, out, out if product is None else product
    shapes, strides = tuple(tuple(t.shape) for t in tensors), tuple(t.stride() for t in tensors)
    run = _prepared(shapes, strides, left.dtype, left.device, down, product is not None, addend is not None, tile)
    addresses = [t.data_ptr() for t in (*tensors, out if addend is None else addend)]
    if run is None or any(address % ALIGNMENT_BYTES for address in addresses):
        return False
    if addend is not None and not addend.is_contiguous():
        return False
    with torch.cuda.device_of(left):
        run(triton.runtime.driver.active.get_current_stream(left.get_device()), *addresses)
    return True


@operator("product_", lambda out, x, weight: None, mutates=("out",))
def product_(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out (R, N) = x (R, K) times weight (N, K) transposed."""
    if not launch_product(x, weight, out):
        torch.mm(x, weight.T, out=out)


@operator("product_backward", lambda dy, weight: dy.new_empty(dy.shape[0], weight.shape[1]))
def product_backward(dy: Tensor, weight: Tensor) -> Tensor:
    """dy (R, N) times weight (N, K): the gradient (R, K) of x in x weight^T."""
    dx = dy.new_empty(dy.shape[0], weight.shape[1])
    if not launch_product(dy, weight, dx, down=(False, True)):
        torch.mm(dy, weight, out=dx)
    return dx


@operator("add_product_", lambda out, addend, x, weight: None, mutates=("out",))
def add_product_(out: Tensor, addend: Tensor, x: Tensor, weight: Tensor) -> None:
    """out = addend + x weight^T, rounded once; out may be addend."""
    if not launch_product(x, weight, out, addend=addend):
        torch.addmm(addend, x, weight.T, out=out)


@operator("weight_backward_", lambda gradient, dy, x, accumulate: None, mutates=("gradient",))
def weight_backward_(gradient: Tensor, dy: Tensor, x: Tensor, accumulate: bool) -> None:
    """gradient (N, K) = dy (R, N) transposed times x (R, K), or to ``accumulate`` that and what it was."""
    if accumulate or not launch_product(dy, x, gradient, down=(True, True)):
        gradient.addmm_(dy.T, x, beta=int(accumulate))


@operator("swiglu_product_", lambda gate_up, *_: _product_like(gate_up), mutates=("gate_up",))
def swiglu_product_(gate_up: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up (R, F), with gate | up (R, 2F) = x (R, K) times weight (2F, K) transposed."""
    product = _product_like(gate_up)
    if launch_product(x, weight, gate_up, product):
        return product
    product_(gate_up, x, weight)
    return swiglu_op(gate_up)
