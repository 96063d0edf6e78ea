"""The small device functions that the Hopper kernels share: rings of tiles, masks, the draw of work, adds by TMA.

A ``Ring`` is how tiles travel from the producer warp to the consumers. Each of its ``STAGES`` slots has two mbarriers:

    full     completed by the copy engine when the bytes it was told to expect have landed
    empty    completed when every consumer that reads it has arrived, each once, after its last read

Both count steps: step s lives in slot s % STAGES, in the (s // STAGES)-th turn of that slot. An mbarrier has one bit of
memory: waiting for parity p returns once the phase of that parity is complete, and a fresh barrier counts as having
completed parity 1. So consumers of turn t wait on ``full`` for parity t & 1, the producer waits on ``empty`` for parity
(t & 1) ^ 1, and passes at once in turn 0.
"""

# mypy: allow-untyped-defs
# A kernel's arguments are Triton values.

from typing import Any, dataclass_transform

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate, base_value

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NEVER = gl.constexpr(float("-inf"))
"""The score of a key that a query does not see."""

ROWS = gl.constexpr(64)
"""Rows of a warpgroup's matmul: each of its four warps holds 16."""


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """A kernel's value of the fields that a class and its bases annotate; it is made of them in this order."""
    classes = reversed(cls.__mro__)
    cls.__annotations__ = {k: v for each in classes for k, v in vars(each).get("__annotations__", {}).items()}
    names = gl.constexpr(tuple(cls.__annotations__))  # Triton keys its cache by the constants of a closure only

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, value in zip(names.value, values, strict=True):
            setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))

    cls.__init__ = __init__  # type: ignore[misc]
    return _aggregate(cls)


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


@aggregate
class Ring:
    """Tiles (STAGES, rows, columns) in shared memory, with the barriers of their slots."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def slot(self, step):
        # For powers of two, & is what % gives without its cases for negative steps.
        return step & (self.STAGES - 1) if self.STAGES & (self.STAGES - 1) == 0 else step % self.STAGES

    @gluon.jit
    def parity(self, step):
        if self.STAGES == 1:
            turn = step
        elif self.STAGES == 2:
            turn = step >> 1
        elif self.STAGES == 4:
            turn = step >> 2
        else:
            turn = step // self.STAGES
        return turn & 1

    @gluon.jit
    def begin(self, step, N_BYTES: gl.constexpr):
        """Producer: the barrier for copies of so many bytes in total, once the slot of this step is free."""
        slot = self.slot(step)
        full = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), self.parity(step) ^ 1)
        mbarrier.expect(full, N_BYTES)
        return full

    @gluon.jit
    def load(self, step, descriptor, batch, head, row):
        """Producer: once the slot of this step is free, start copying one (rows, columns) tile of one head into it."""
        full = self.begin(step, descriptor.block_type.nbytes)
        tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], full, self.tiles.index(self.slot(step)))

    @gluon.jit
    def wait(self, step, pred=True):
        """Consumer: the tile of this step, when it is there."""
        slot = self.slot(step)
        mbarrier.wait(self.full.index(slot), self.parity(step), pred=pred)
        return self.tiles.index(slot)

    @gluon.jit
    def release(self, step):
        """Consumer: this step's tile has been read for the last time."""
        mbarrier.arrive(self.empty.index(self.slot(step)), count=1)


@gluon.jit
def make_ring(dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, STAGES: gl.constexpr, readers):
    """An empty ring that ``readers`` warpgroups release."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return add_barriers(gl.allocate_shared_memory(dtype, [STAGES, rows, columns], layout), STAGES, readers)


@gluon.jit
def make_items(readers):
    """An empty ring for ``announce``."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return add_barriers(gl.allocate_shared_memory(gl.int32, [2, 1], layout), 2, readers)


@gluon.jit
def add_barriers(tiles, STAGES: gl.constexpr, readers):
    """The ring of these slots."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=readers)
    return Ring(tiles, full, empty, STAGES)


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
    """Producer: tell the consumers which item follows that of this turn. ``items`` is a ring of single numbers."""
    slot = items.slot(turn)
    mbarrier.wait(items.empty.index(slot), items.parity(turn) ^ 1)
    items.tiles.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(items.full.index(slot), count=1)


@gluon.jit
def announced(items, turn):
    """Consumer: which item follows that of this turn."""
    item = gl.max(items.wait(turn).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    items.release(turn)
    return item
