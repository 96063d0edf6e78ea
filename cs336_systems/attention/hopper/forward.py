"""FlashAttention forward on Hopper: the kernel and its launcher. The schedule is explained in the package's docstring.

Shape legend: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

# mypy: allow-untyped-defs
# A kernel's arguments are Triton values; the host functions below are typed.

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
from triton.language.core import _aggregate as aggregate

from cs336_systems.attention.hopper.launch import (
    copyable,
    descriptor,
    empty_result,
    n_multiprocessors,
    section_heads,
)
from cs336_systems.attention.hopper.plans import QueryPlan
from cs336_systems.attention.hopper.primitives import (
    LN_2,
    LOG2_E,
    NEVER,
    ROWS,
    Ring,
    announce,
    announced,
    make_items,
    make_ring,
    visible,
)
from cs336_systems.attention.hopper.schedules import (
    FORWARD,
    MAX_REGISTERS_WITH,
    ForwardSchedule,
    padded_head_dim,
)


@aggregate
class Tiles:
    """The shared memory of a program."""

    items: Ring
    q: Ring
    """A slot for each consumer, which that one alone releases."""
    k: Ring
    v: Ring
    o: gl.shared_memory_descriptor
    """For each consumer, its rows on the way out."""
    turns: gl.shared_memory_descriptor
    """For each consumer, the barrier at which it awaits its turn."""

    @gluon.constexpr_function
    def __init__(self, items, q, k, v, o, turns):
        self.items = items
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.turns = turns


@gluon.jit
def forward_producer(plan, q, k, v, taken, tiles):
    """One warp: the queries of an item, then its keys and values from the last tile to the first."""
    CONSUMERS: gl.constexpr = tiles.o.shape[0]
    step = 0
    turn = 0
    position = gl.program_id(0)
    while position < plan.n_items():
        batch, head, first_query, n_key_tiles = plan.item(position)
        for consumer in gl.static_range(CONSUMERS):
            tiles.q.load(turn * CONSUMERS + consumer, q, batch, head, first_query + consumer * ROWS)
        kv_head = head // plan.group
        for i in range(n_key_tiles):
            row = (n_key_tiles - 1 - i) * plan.BLOCK_K
            tiles.k.load(step, k, batch, kv_head, row)
            tiles.v.load(step, v, batch, kv_head, row)
            step += 1
        if plan.PERSISTENT:
            position = gl.num_programs(0) + gl.atomic_add(taken, 1)
            announce(tiles.items, turn, position)
        else:
            position = plan.n_items()
        turn += 1


@gluon.jit
def halves(x):
    """The left and the right columns of a product, without moving any between threads."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def side_by_side(left, right, layout: gl.constexpr):
    """What ``halves`` took apart."""
    both = gl.join(left, right).permute([0, 2, 1]).reshape([left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def exp2_by_fma(x):
    """2^x for x <= 0 by multiply-adds: 2^n, n the nearest integer, in the exponent bits, times a cubic of the rest.

    The cubic has the least relative error, 1e-4, a twentieth of what rounding to bf16 adds; it is exact at 0, so that
    2^-inf is 0: -127 as an exponent leaves no bit.
    """
    x = gl.maximum(x, -127.0)
    shifted = x + 12582912.0  # 3 * 2^22: its last bits are n
    rest = x - (shifted - 12582912.0)
    cubic = gl.fma(gl.fma(gl.fma(rest, 0.05500892, 0.24221098), rest, 0.69328293), rest, 1.0)
    bits = cubic.to(gl.int32, bitcast=True) + shifted.to(gl.int32, bitcast=True) * 8388608
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def exp2(x, SHARED: gl.constexpr):
    """2^x for x <= 0; shared, the last quarter of the columns leaves the exponential unit to the others."""
    if SHARED:
        layout: gl.constexpr = x.type.layout
        left, right = halves(x)
        half_layout: gl.constexpr = right.type.layout
        third, fourth = halves(right)
        return side_by_side(gl.exp2(left), side_by_side(gl.exp2(third), exp2_by_fma(fourth), half_layout), layout)
    else:
        return gl.exp2(x)


@gluon.jit
def online_softmax(scores, row_max, row_sum, scale_log2, SHARED_EXP2: gl.constexpr):
    """Take one tile of scores into the running maximum and sum: (P, row_max, row_sum, factor for what came before)."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    # -inf - -inf is NaN: a row that has seen nothing yet subtracts 0.
    subtracted = gl.where(new_max == NEVER, 0.0, new_max)
    p = exp2(scores * scale_log2 - subtracted[:, None], SHARED_EXP2)
    rescale = gl.exp2(row_max - subtracted)
    return p, new_max, row_sum * rescale + gl.sum(p, 1), rescale


@gluon.jit
def forward_consumer(
    plan, o, lse, tiles, scale_log2,
    WHO: gl.constexpr, TAKE_TURNS: gl.constexpr, EARLY_SCORES: gl.constexpr, SHARED_EXP2: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 query rows of each item."""
    CONSUMERS: gl.constexpr = tiles.o.shape[0]
    BLOCK_K: gl.constexpr = tiles.k.tiles.shape[1]
    BLOCK_D: gl.constexpr = tiles.k.tiles.shape[2]
    dtype: gl.constexpr = tiles.k.tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    no_scores = gl.zeros([ROWS, BLOCK_K], gl.float32, scores_layout)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores_layout))
    o_tile = tiles.o.index(WHO)

    step = 0
    blocks = 0
    turn = 0
    position = gl.program_id(0)
    while position < plan.n_items():
        batch, head, first_query, n_key_tiles = plan.item(position)
        first_query += WHO * ROWS
        n_clear = plan.n_clear(first_query)
        queries = first_query + gl.arange(0, ROWS, rows)
        q_step = turn * CONSUMERS + WHO
        q_tile = tiles.q.wait(q_step)

        # The last key tile: nothing to overlap with yet, and the only one that every item has to mask.
        product = warpgroup_mma(q_tile, tiles.k.wait(step).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, (product,))
        tiles.k.release(step)
        keys = (n_key_tiles - 1) * BLOCK_K + columns
        seen = visible(queries[:, None], keys[None, :], plan.n_queries, plan.n_keys, plan.CAUSAL)
        scores = gl.where(seen, scores, NEVER)
        row_max = gl.full([ROWS], NEVER, gl.float32, rows)
        row_sum = gl.zeros([ROWS], gl.float32, rows)
        p, row_max, row_sum, _ = online_softmax(scores, row_max, row_sum, scale_log2, SHARED_EXP2)
        p = gl.convert_layout(p.to(dtype), p_layout)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, o_layout)

        k_tile = tiles.k.wait(step + 1, n_key_tiles > 1)
        if EARLY_SCORES:
            product = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, use_acc=False, is_async=True)
        for i in range(1, n_key_tiles):
            if EARLY_SCORES:
                scores = warpgroup_mma_wait(0, (product,))
                tiles.k.release(step + 1)
                weighted = warpgroup_mma(p, tiles.v.wait(step), acc, is_async=True)
            else:
                if TAKE_TURNS:
                    # What the consumer before it has done once more than this one (the first: as often), this one may.
                    mbarrier.wait(tiles.turns.index(WHO), blocks & 1 if WHO > 0 else blocks & 1 ^ 1)
                    blocks += 1
                product = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                weighted = warpgroup_mma(p, tiles.v.wait(step), acc, is_async=True)
                if TAKE_TURNS:
                    mbarrier.arrive(tiles.turns.index((WHO + 1) % CONSUMERS), count=1)
                scores = warpgroup_mma_wait(1, (product,))
                tiles.k.release(step + 1)
            key_tile = n_key_tiles - 1 - i
            if key_tile >= n_clear:
                keys = key_tile * BLOCK_K + columns
                seen = visible(queries[:, None], keys[None, :], plan.n_queries, plan.n_keys, plan.CAUSAL)
                scores = gl.where(seen, scores, NEVER)
            next_p, row_max, row_sum, rescale = online_softmax(scores, row_max, row_sum, scale_log2, SHARED_EXP2)
            next_p = gl.convert_layout(next_p.to(dtype), p_layout)
            # Asked for early, because ptxas moves the wait for O up to the last branch: before the softmax, otherwise.
            k_tile = tiles.k.wait(step + 2, i + 1 < n_key_tiles)
            # p is listed so that its registers stay untouched while the matmul that reads them is in flight.
            if EARLY_SCORES:
                # After the last tile this multiplies whatever the slot holds, and nobody looks at the product.
                product = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, use_acc=False, is_async=True)
                acc, p = warpgroup_mma_wait(1, (weighted, p))
            else:
                acc, p = warpgroup_mma_wait(0, (weighted, p))
            tiles.v.release(step)
            acc = acc * gl.convert_layout(rescale, o_rows)[:, None]
            p = next_p
            step += 1

        if EARLY_SCORES:
            warpgroup_mma_wait(0, (product,))
        tiles.q.release(q_step)
        weighted = warpgroup_mma(p, tiles.v.wait(step), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (weighted,))
        tiles.v.release(step)
        step += 1

        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # saw no key: acc is 0 and row_max -inf, which is the answer
        lse_row = lse + (batch * plan.n_heads + head).to(gl.int64) * plan.n_queries
        gl.store(lse_row + queries, (row_max + gl.log2(row_sum)) * LN_2, mask=queries < plan.n_queries)
        acc = acc / gl.convert_layout(row_sum, o_rows)[:, None]
        tma.store_wait(0)  # of the item before: its tile has left shared memory
        o_tile.store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [batch, head, first_query, 0], o_tile)
        position = announced(tiles.items, turn) if plan.PERSISTENT else plan.n_items()
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["group", "section_heads"])  # a 1 would become a constant, which a Plan cannot hold
def hopper_forward_kernel(
    q, k, v, o, lse, taken, group, section_heads, scale_log2, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, PERSISTENT: gl.constexpr, TAKE_TURNS: gl.constexpr, EARLY_SCORES: gl.constexpr,
    SHARED_EXP2: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """o (B, H, Q, D) and lse (B, H, Q); each program owns one query tile at a time."""
    BLOCK_K: gl.constexpr = k.block_shape[2]
    BLOCK_D: gl.constexpr = k.block_shape[3]
    dtype: gl.constexpr = k.dtype
    plan = QueryPlan(
        q.shape[2], k.shape[2], q.shape[1], q.shape[0] * q.shape[1], group, section_heads,
        PERSISTENT, CAUSAL, CONSUMERS * ROWS, BLOCK_K,
    )  # fmt: skip
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(consumer), count=1)
    q_tiles = make_ring(dtype, ROWS, BLOCK_D, CONSUMERS, 1)
    tiles = Tiles(
        make_items(CONSUMERS),
        q_tiles,
        make_ring(dtype, BLOCK_K, BLOCK_D, STAGES, CONSUMERS),
        make_ring(dtype, BLOCK_K, BLOCK_D, STAGES, CONSUMERS),
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_D], q_tiles.tiles.layout),
        turns,
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (forward_consumer, (plan, o, lse, tiles, scale_log2, 0, TAKE_TURNS, EARLY_SCORES, SHARED_EXP2)),
                (forward_consumer, (plan, o, lse, tiles, scale_log2, 1, TAKE_TURNS, EARLY_SCORES, SHARED_EXP2)),
                (forward_producer, (plan, q, k, v, taken, tiles)),
            ],
            [4, 1],
            [WORKER_REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (forward_consumer, (plan, o, lse, tiles, scale_log2, 0, TAKE_TURNS, EARLY_SCORES, SHARED_EXP2)),
                (forward_consumer, (plan, o, lse, tiles, scale_log2, 1, TAKE_TURNS, EARLY_SCORES, SHARED_EXP2)),
                (forward_consumer, (plan, o, lse, tiles, scale_log2, 2, TAKE_TURNS, EARLY_SCORES, SHARED_EXP2)),
                (forward_producer, (plan, q, k, v, taken, tiles)),
            ],
            [4, 4, 1],
            [WORKER_REGISTERS, WORKER_REGISTERS, 32],
        )


def launch_forward(
    q_BHQD: Tensor,
    k_BKND: Tensor,
    v_BKND: Tensor,
    causal: bool,
    scale: float,
    schedule: ForwardSchedule | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, H, Q, D) laid out like q, and lse (B, H, Q) in fp32; ``schedule`` overrides the table's."""
    batch, n_heads, n_queries, d_head = q_BHQD.shape
    n_kv_heads, n_keys = k_BKND.shape[1:3]
    o = empty_result(q_BHQD)
    lse = torch.empty(batch, n_heads, n_queries, dtype=torch.float32, device=q_BHQD.device)
    if batch == 0:
        return o, lse
    q, k, v = (copyable(x) for x in (q_BHQD, k_BKND, v_BKND))
    block_d = padded_head_dim(d_head)
    schedule = schedule or FORWARD[block_d]
    group = n_heads // n_kv_heads
    keys_and_values = 2 * n_keys * d_head * k.element_size()
    rows, keys = (1, 1, ROWS.value, block_d), (1, 1, schedule.block_k, block_d)
    items = triton.cdiv(n_queries, ROWS.value * schedule.consumers) * batch * n_heads
    programs = min(items, n_multiprocessors(q.device)) if schedule.persistent else items
    with torch.cuda.device_of(q):  # Triton launches on the current device, which may be another
        hopper_forward_kernel[(programs,)](
            descriptor(q, rows),
            descriptor(k, keys),
            descriptor(v, keys),
            descriptor(o, rows),
            lse,
            # How many positions beyond the first ones have been taken.
            torch.zeros(1 if schedule.persistent else 0, dtype=torch.int32, device=q.device),
            group,
            section_heads(keys_and_values, batch * n_kv_heads) * group,
            scale * LOG2_E.value,
            CAUSAL=causal,
            CONSUMERS=schedule.consumers,
            STAGES=schedule.stages,
            PERSISTENT=schedule.persistent,
            TAKE_TURNS=schedule.take_turns,
            EARLY_SCORES=schedule.early_scores,
            SHARED_EXP2=schedule.shared_exp2,
            WORKER_REGISTERS=schedule.worker_registers,
            num_warps=4,
            maxnreg=MAX_REGISTERS_WITH[schedule.consumers],
        )
    return o, lse
