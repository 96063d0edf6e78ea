"""The small device functions that the Hopper kernels share: masks, drawing of work, adds by TMA."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from cs336_systems.kernels.copy_engine import add_barriers

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NEVER = gl.constexpr(float("-inf"))
"""The score of a key that a query does not see."""

ROWS = gl.constexpr(64)
"""Rows of a warpgroup's matmul: each of its four warps holds 16."""

STATISTICS = gl.constexpr(16)
"""Columns of a query's row of statistics: 16, the smallest inner dimension of a wgmma in bf16 and fp16."""
PARTS = gl.constexpr(3)
"""Columns per number, one for each part: the number is the sum of its parts, each times its ``part_weight``."""


@gluon.constexpr_function
def part_weight(part):
    """The factor of a part. Each part holds the rounding error of the previous one: fp16 has 11 bits, bf16 8.

    In fp16 numbers must be below 2 ** 31, and bits below 2 ** -32 are lost.
    """
    return 2.0 ** (15 - 11 * part)


@builtin
def tma_add(descriptor, coordinates, tile, _semantic=None):
    """Add a shared-memory tile to global memory, asynchronously; Gluon 3.6 has the operation but no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)


@gluon.jit
def finish_adds():
    """Wait until this warpgroup's adds are done in global memory; ``tma.store_wait`` only waits for their reads."""
    zero = gl.to_tensor(0)
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()  # of this warpgroup: several warps add parts of a wide tile, and each waits for its own


@gluon.jit
def make_items(readers):
    """An empty ring for ``announce``."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return add_barriers(gl.allocate_shared_memory(gl.int32, [2, 1], layout), 2, readers)


@gluon.jit
def visible(queries, keys, n_queries, n_keys, CAUSAL: gl.constexpr):
    """Whether a query sees a key, for broadcastable index blocks; causal: the last query sees the last key."""
    return keys <= queries + (n_keys - n_queries) if CAUSAL else keys < n_keys


@gluon.jit
def take_item(taken, n_items):
    """Producer: a position that no program has taken, or one after the last; the first ones go by program number.

    ``taken`` counts the calls of all programs, one for each item. The last one leaves it 0 for the next kernel.
    """
    before = gl.atomic_add(taken, 1)
    if before == n_items - 1:
        gl.store(taken, 0)
    return gl.num_programs(0) + before


@gluon.jit
def announce(items, turn, item):
    """Producer: send the consumers the number of the next item. ``items`` is a ring of single numbers."""
    slot = items.slot(turn)
    mbarrier.wait(items.empty.index(slot), items.parity(turn) ^ 1)
    items.tiles.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(items.full.index(slot), count=1)


@gluon.jit
def announced(items, turn):
    """Consumer: receive the number of the next item."""
    item = gl.max(items.wait(turn).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    items.release(turn)
    return item
