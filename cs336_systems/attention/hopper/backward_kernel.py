"""FlashAttention backward on Hopper: the kernel. The schedule is in the package's docstring.

Shape legend: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.attention.hopper.plans import KeyPlan
from cs336_systems.attention.hopper.primitives import (
    NEVER,
    PARTS,
    ROWS,
    STATISTICS,
    announce,
    announced,
    finish_adds,
    make_items,
    part_weight,
    take_item,
    tma_add,
    visible,
)
from cs336_systems.kernels.copy_engine import Ring, aggregate, make_ring


@aggregate
class Tiles:
    """The shared memory of a program."""

    items: Ring
    k: Ring
    v: Ring
    q: Ring
    do: gl.shared_memory_descriptor
    """Output gradients of the queries in the same slot of ``q``, loaded and released together."""
    stats: gl.shared_memory_descriptor
    """Statistics of those queries, (STAGES, BLOCK_Q, STATISTICS)."""
    minus_lse: gl.shared_memory_descriptor
    """The weights that subtract lse (``minus_weights``)."""
    minus_delta: gl.shared_memory_descriptor
    """The same for delta."""
    ds: gl.shared_memory_descriptor
    """dS^T of two steps, (2, BLOCK_K, BLOCK_Q); each consumer writes its keys and reads all."""
    ds_full: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    """Each consumer's part of a dq tile before it is copied out, and at the end its rows of dk, then dv."""


@gluon.jit
def backward_producer(plan, q, k, v, do, stats, taken, ends, tiles):
    """One warp: load a tile's keys and values once, then each query tile with its statistics and output gradients."""
    step = 0
    turn = 0
    position = gl.program_id(0)
    while position < plan.n_items():
        work = plan.key_tile(position, ends)
        tiles.k.load(turn, k, work.batch, work.kv_head, work.first_key)
        tiles.v.load(turn, v, work.batch, work.kv_head, work.first_key)
        head = work.kv_head * plan.group
        tile = work.first_tile
        for _ in range(plan.n_steps(work)):
            row = tile * plan.BLOCK_Q
            arrived = tiles.q.begin(step, q.block_type.nbytes + stats.block_type.nbytes + do.block_type.nbytes)
            slot = tiles.q.slot(step)
            stats_row = (work.batch * plan.n_heads + head) * plan.padded + row
            tma.async_copy_global_to_shared(q, [work.batch, head, row, 0], arrived, tiles.q.tiles.index(slot))
            tma.async_copy_global_to_shared(stats, [stats_row, 0], arrived, tiles.stats.index(slot))
            tma.async_copy_global_to_shared(do, [work.batch, head, row, 0], arrived, tiles.do.index(slot))
            head, tile = plan.after(work, head, tile, 1)
            step += 1
        position = take_item(taken, plan.n_items())
        announce(tiles.items, turn, position)
        turn += 1


@gluon.jit
def minus_weights(stats, FIRST: gl.constexpr):
    """(ROWS, STATISTICS), all rows alike: minus the weights in columns FIRST, FIRST + 1, ..., else 0.

    Its product with a query's statistics is minus the number whose parts begin at FIRST.
    """
    across: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    rows = gl.zeros([ROWS, STATISTICS], gl.float32, across)
    columns = gl.arange(0, STATISTICS, gl.SliceLayout(0, across))
    for part in gl.static_range(PARTS):
        rows = gl.where((columns == FIRST + part)[None, :], -part_weight(part), rows)
    tile = gl.allocate_shared_memory(stats.dtype, [ROWS, STATISTICS], stats.layout)
    tile.store(rows.to(stats.dtype))
    return tile


@gluon.jit
def product_minus(left, right, weights, stats, registers, STATISTICS_LAST: gl.constexpr):
    """Start ``left @ right`` minus lse / scale or delta of each column's query: two matmuls for warpgroup_mma_wait.

    left (ROWS, D), right (D, BLOCK_Q), weights (ROWS, STATISTICS), stats (BLOCK_Q, STATISTICS). The fp32 result takes
    the registers of ``registers`` (ROWS, BLOCK_Q), whose values are not read. ``BackwardSchedule`` says what
    STATISTICS_LAST is for.
    """
    if STATISTICS_LAST:
        product = warpgroup_mma(left, right, registers, use_acc=False, is_async=True)
        return warpgroup_mma(weights, stats.permute((1, 0)), product, is_async=True)
    negative = warpgroup_mma(weights, stats.permute((1, 0)), registers, use_acc=False, is_async=True)
    return warpgroup_mma(left, right, negative, is_async=True)


@gluon.jit
def dq_product(tiles, keys, step, valid, WHO: gl.constexpr):
    """Start this consumer's part of dS K, as soon as both consumers have written their dS^T of this step.

    Each consumer takes half of the columns. Unless ``valid``, it waits for nothing, and the product is not read.
    """
    COLUMNS: gl.constexpr = tiles.q.tiles.shape[2] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    slot = step & 1
    mbarrier.wait(tiles.ds_full.index(slot), step >> 1 & 1, pred=valid)
    ds = tiles.ds.index(slot).permute((1, 0))
    return warpgroup_mma(ds, keys.slice(WHO * COLUMNS, COLUMNS, 1), nothing, use_acc=False, is_async=True)


@gluon.jit
def add_dq(plan, dq, turns, key_tile, tiles, part, row, WHO: gl.constexpr):
    """Add this consumer's part of a dq tile, whose first query is this row of the sums, to global memory.

    Numbers are stored in the order in which threads hold them, four of a thread side by side: row-major storage would
    cause bank conflicts in shared memory. ``halves_of_sums`` reads this order.
    """
    BLOCK_Q: gl.constexpr = tiles.ds.shape[2]
    BLOCK_D: gl.constexpr = tiles.q.tiles.shape[2]
    PART_ROWS: gl.constexpr = tiles.dq.shape[1]
    tile = tiles.dq.index(WHO)
    # Row: warp, half, group of four threads. Column: eight columns, thread of four, one of two.
    part = part.reshape([4, 2, 8, part.shape[1] // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    tma.store_wait(0)  # the previous part has been copied out
    tile.store(part.reshape([PART_ROWS, 32]))
    fence_async_shared()
    turn = turns + row // BLOCK_Q * 2 + WHO
    if plan.ORDERED:
        adds_before = plan.adds_before(key_tile, row % plan.padded)
        while gl.load(turn, volatile=True) != adds_before:
            pass
    tma_add(dq, [row * (BLOCK_D // 32) + WHO * PART_ROWS, 0], tile)
    if plan.ORDERED:
        finish_adds()
        gl.atomic_add(turn, 1, sem="release", scope="gpu")


@gluon.jit
def backward_consumer(
    plan, dq, dk, dv, turns, ends, tiles, scale, scale_log2,
    WHO: gl.constexpr, LATE_DQ: gl.constexpr, LEFT_IN_REGISTERS: gl.constexpr, STATISTICS_LAST: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 of the program's keys, and half of each dq tile."""
    BLOCK_Q: gl.constexpr = tiles.q.tiles.shape[1]
    BLOCK_D: gl.constexpr = tiles.q.tiles.shape[2]
    BLOCK_K: gl.constexpr = tiles.k.tiles.shape[1]
    dtype: gl.constexpr = tiles.q.tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, scores_layout)

    in_tile = gl.arange(0, BLOCK_Q, columns)
    no_scores = gl.zeros([ROWS, BLOCK_Q], gl.float32, scores_layout)
    out_tile = tiles.dq.index(WHO)._reinterpret(dtype, [ROWS, BLOCK_D], tiles.k.tiles.layout)

    first_step = 0
    turn = 0
    position = gl.program_id(0)
    while position < plan.n_items():
        work = plan.key_tile(position, ends)
        first_key = work.first_key + WHO * ROWS
        keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        first_clear = plan.first_clear(first_key, ROWS)
        if ends is not None:
            first_end = plan.document_end(ends, work.batch, first_key) // BLOCK_Q
        dk_sum = gl.zeros([ROWS, BLOCK_D], gl.float32, d_layout)
        dv_sum = gl.zeros([ROWS, BLOCK_D], gl.float32, d_layout)
        all_keys = tiles.k.wait(turn)
        own_keys = all_keys.slice(WHO * ROWS, ROWS, 0)
        own_values = tiles.v.wait(turn).slice(WHO * ROWS, ROWS, 0)
        if LEFT_IN_REGISTERS:
            own_keys = own_keys.load(gl.DotOperandLayout(0, scores_layout, 2))
            own_values = own_values.load(gl.DotOperandLayout(0, scores_layout, 2))
        head_row = plan.first_row(work)
        dq_row = head_row
        tile = work.first_tile
        end_step = first_step + plan.n_steps(work)
        gl.assume(end_step > first_step)
        first_q = tiles.q.wait(first_step).permute((1, 0))
        first_stats = tiles.stats.index(tiles.q.slot(first_step))
        scores_t = product_minus(own_keys, first_q, tiles.minus_lse, first_stats, no_scores, STATISTICS_LAST)
        for step in range(first_step, end_step):
            slot = tiles.q.slot(step)
            q_tile = tiles.q.tiles.index(slot)
            stats = tiles.stats.index(slot)
            do_tile = tiles.do.index(slot)

            s_t = warpgroup_mma_wait(0, (scores_t,))
            ds_over_p = product_minus(
                own_values, do_tile.permute((1, 0)), tiles.minus_delta, stats, no_scores, STATISTICS_LAST
            )
            if LATE_DQ:
                dq_part = dq_product(tiles, all_keys, step - 1, step > first_step, WHO)
            log2_p = s_t * scale_log2
            # The branch stands before exp2 on purpose: else ptxas moves exp2 ahead of the products started above.
            needs_mask = tile < first_clear
            if ends is not None:
                needs_mask = needs_mask | (tile >= first_end)
            if needs_mask:
                queries = tile * BLOCK_Q + in_tile
                seen = visible(queries[None, :], keys[:, None], plan.n_queries, plan.n_keys, plan.CAUSAL)
                if ends is not None:
                    key_ends = gl.load(ends + work.batch * plan.n_keys + keys, mask=keys < plan.n_keys, other=0)
                    seen = seen & (queries[None, :] < key_ends[:, None])
                log2_p = gl.where(seen, log2_p, NEVER)
            p_t = gl.exp2(log2_p)
            p_left = gl.convert_layout(p_t.to(dtype), left_layout)
            dv_next = warpgroup_mma(p_left, do_tile, dv_sum, is_async=True)

            if LATE_DQ:
                ds_over_p, dq_part = warpgroup_mma_wait(1, (ds_over_p, dq_part))
            else:
                ds_over_p = warpgroup_mma_wait(1, (ds_over_p,))
            ds_t = (p_t * ds_over_p).to(dtype)
            tiles.ds.index(step & 1).slice(WHO * ROWS, ROWS, 0).store(ds_t)
            fence_async_shared()
            mbarrier.arrive(tiles.ds_full.index(step & 1), count=1)
            ds_left = gl.convert_layout(ds_t, left_layout)
            dk_next = warpgroup_mma(ds_left, q_tile, dk_sum, is_async=True)
            if not LATE_DQ:
                dq_part = dq_product(tiles, all_keys, step, True, WHO)
                dk_sum, dv_sum = warpgroup_mma_wait(1, (dk_next, dv_next))
                tiles.q.release(step)
                dq_row = head_row + tile * BLOCK_Q
            # After the last step this multiplies whatever the slot holds, and the product is not read.
            next_q = tiles.q.wait(step + 1, step + 1 < end_step).permute((1, 0))
            next_stats = tiles.stats.index(tiles.q.slot(step + 1))
            scores_t = product_minus(own_keys, next_q, tiles.minus_lse, next_stats, s_t, STATISTICS_LAST)
            if not LATE_DQ:
                dq_part = warpgroup_mma_wait(2, (dq_part,))
            if not LATE_DQ or step > first_step:  # there is none before the first step
                add_dq(plan, dq, turns, work.first_key // BLOCK_K, tiles, dq_part, dq_row, WHO)
            if LATE_DQ:
                dk_sum, dv_sum = warpgroup_mma_wait(2, (dk_next, dv_next))
                tiles.q.release(step)
                dq_row = head_row + tile * BLOCK_Q
            head_row, tile = plan.after(work, head_row, tile, plan.padded)
        warpgroup_mma_wait(0, (scores_t,))
        if LATE_DQ:
            dq_part = dq_product(tiles, all_keys, end_step - 1, True, WHO)
            add_dq(plan, dq, turns, work.first_key // BLOCK_K, tiles, warpgroup_mma_wait(0, (dq_part,)), dq_row, WHO)
        tiles.k.release(turn)
        tiles.v.release(turn)

        tma.store_wait(0)
        out_tile.store((dk_sum * scale).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk, [work.batch, work.kv_head, first_key, 0], out_tile)
        tma.store_wait(0)
        out_tile.store(dv_sum.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv, [work.batch, work.kv_head, first_key, 0], out_tile)
        tma.store_wait(0)
        first_step = end_step
        position = announced(tiles.items, turn)
        turn += 1


@gluon.jit(do_not_specialize=["group", "section_heads"])  # a 1 would become a constant, which a Plan cannot hold
def hopper_backward_kernel(
    q, k, v, do, stats, dq, dk, dv, turns, taken, ends, group, section_heads, padded, scale, scale_log2,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, ORDERED: gl.constexpr,
    LATE_DQ: gl.constexpr, LEFT_IN_REGISTERS: gl.constexpr, STATISTICS_LAST: gl.constexpr,
):  # fmt: skip
    """dk, dv (B, K, N, D) and fp32 sums of unscaled dq, as ``add_dq`` has them; a program owns one key tile at a time.

    ``ends`` (B, N) int32 holds the first query after each key's document; None without documents.
    """
    BLOCK_Q: gl.constexpr = q.block_shape[2]
    BLOCK_K: gl.constexpr = k.block_shape[2]
    BLOCK_D: gl.constexpr = k.block_shape[3]
    dtype: gl.constexpr = k.dtype
    plan = KeyPlan(  # type: ignore[call-arg]
        q.shape[2], k.shape[2], q.shape[1], k.shape[0] * k.shape[1], group, section_heads,
        CAUSAL, BLOCK_Q, BLOCK_K, padded, ORDERED, ends is not None,
    )  # fmt: skip
    q_tiles = make_ring(dtype, BLOCK_Q, BLOCK_D, STAGES, 2)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(ds_full.index(slot), count=2)
    tiles = Tiles(
        make_items(2),
        make_ring(dtype, BLOCK_K, BLOCK_D, KEY_STAGES, 2),
        make_ring(dtype, BLOCK_K, BLOCK_D, KEY_STAGES, 2),
        q_tiles,
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, BLOCK_D], q_tiles.tiles.layout),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, STATISTICS], stats.layout),
        minus_weights(stats, 0),
        minus_weights(stats, PARTS),
        gl.allocate_shared_memory(dtype, [2, BLOCK_K, BLOCK_Q], ds_layout),
        ds_full,
        gl.allocate_shared_memory(gl.float32, [2, dq.block_shape[0], dq.block_shape[1]], dq.layout),
    )
    fence_async_shared()  # threads stored the weights, wgmma reads them
    gl.warp_specialize(
        [
            (backward_consumer, (
                plan, dq, dk, dv, turns, ends, tiles, scale, scale_log2, 0,
                LATE_DQ, LEFT_IN_REGISTERS, STATISTICS_LAST,
            )),
            (backward_consumer, (
                plan, dq, dk, dv, turns, ends, tiles, scale, scale_log2, 1,
                LATE_DQ, LEFT_IN_REGISTERS, STATISTICS_LAST,
            )),
            (backward_producer, (plan, q, k, v, do, stats, taken, ends, tiles)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
