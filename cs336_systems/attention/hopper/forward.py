"""FlashAttention forward on Hopper: the kernel and its launcher. The schedule is explained in the package's docstring.

Shape legend: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

from functools import lru_cache

import torch
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

from cs336_systems.attention.hopper import host
from cs336_systems.attention.hopper.plans import QueryPlan
from cs336_systems.attention.hopper.primitives import (
    LN_2,
    LOG2_E,
    NEVER,
    ROWS,
    announce,
    announced,
    make_items,
    take_item,
    visible,
)
from cs336_systems.attention.hopper.schedules import (
    MAX_REGISTERS_WITH,
    ForwardSchedule,
    forward_schedule,
    padded_head_dim,
)
from cs336_systems.attention.hopper.softmax import online_softmax, rescaled, thread_sums
from cs336_systems.kernels.copy_engine import Ring, aggregate, can_be_copied, descriptor, example, make_ring
from cs336_systems.kernels.launching import MAX_REMEMBERED, Prepared, ceil_div, n_multiprocessors


@aggregate
class Tiles:
    """The shared memory of a program."""

    items: Ring
    q: Ring
    """Two slots for each consumer, which only that consumer releases: for this item and the next."""
    k: Ring
    v: Ring
    o: gl.shared_memory_descriptor
    """Each consumer's rows of the output, before they are copied out."""
    turns: gl.shared_memory_descriptor
    """The barrier at which each consumer awaits its turn."""


@gluon.jit
def forward_producer(plan, q, k, v, taken, starts, tiles):
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
        if starts is not None:  # tiles of earlier documents are not loaded
            n_key_tiles_here = n_key_tiles - plan.document_tile(starts, batch, first_query)
        else:
            n_key_tiles_here = n_key_tiles
        for i in range(n_key_tiles_here):
            row = (n_key_tiles - 1 - i) * plan.BLOCK_K
            tiles.k.load(step, k, batch, kv_head, row)
            tiles.v.load(step, v, batch, kv_head, row)
            step += 1
        position = take_item(taken, plan.n_items())
        announce(tiles.items, turn, position)
        turn += 1


@gluon.jit
def masked(plan, starts, batch, scores, queries, keys):
    """-inf for the scores of keys that a query does not see."""
    seen = visible(queries[:, None], keys[None, :], plan.n_queries, plan.n_keys, plan.CAUSAL)
    if starts is not None:
        first_seen = gl.load(starts + (batch * plan.n_queries + gl.minimum(queries, plan.n_queries - 1)))
        seen = seen & (keys[None, :] >= first_seen[:, None])
    return gl.where(seen, scores, NEVER)


@gluon.jit
def await_turn(tiles, blocks, WHO: gl.constexpr):
    """Wait until the previous consumer has passed on this block's turn; the first consumer: the previous block's."""
    mbarrier.wait(tiles.turns.index(WHO), blocks & 1 if WHO > 0 else blocks & 1 ^ 1)


@gluon.jit
def pass_turn(tiles, WHO: gl.constexpr):
    """Let the next consumer start its block; the first one follows the last."""
    CONSUMERS: gl.constexpr = tiles.o.shape[0]
    mbarrier.arrive(tiles.turns.index((WHO + 1) % CONSUMERS), count=1)


@gluon.jit
def let_go(tiles, step):
    """Release a key tile that other consumers see but this one does not."""
    tiles.k.wait(step)
    tiles.k.release(step)
    tiles.v.wait(step)
    tiles.v.release(step)


@gluon.jit
def forward_consumer(plan, o, lse, starts, tiles, scale_log2, WHO: gl.constexpr, TAKE_TURNS: gl.constexpr):
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
        batch, head, first_query, n_loaded = plan.item(position)
        if starts is not None:
            first_loaded = plan.document_tile(starts, batch, first_query)
        first_query += WHO * ROWS
        n_key_tiles = plan.n_key_tiles(first_query, ROWS)
        if starts is not None:
            n_key_tiles, n_own, last_document = plan.document_tiles(starts, batch, first_query, ROWS, first_loaded)
        else:
            n_own = n_key_tiles
        for _ in range(n_key_tiles, n_loaded):
            let_go(tiles, step)
            step += 1
            if TAKE_TURNS:
                await_turn(tiles, blocks, WHO)
                pass_turn(tiles, WHO)
                blocks += 1
        n_clear = plan.n_clear(first_query)
        queries = first_query + gl.arange(0, ROWS, rows)
        q_step = turn * CONSUMERS + WHO
        q_tile = tiles.q.wait(q_step)

        # The last key tile: nothing to overlap with yet, and always masked.
        product = warpgroup_mma(q_tile, tiles.k.wait(step).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, (product,))
        tiles.k.release(step)
        scores = masked(plan, starts, batch, scores, queries, (n_key_tiles - 1) * BLOCK_K + columns)
        row_max = gl.full([ROWS], NEVER, gl.float32, rows)
        row_sums = thread_sums(no_scores)
        p, row_max, row_sums, _ = online_softmax(scores, row_max, row_sums, scale_log2)
        p = gl.convert_layout(p.to(dtype), p_layout)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, o_layout)

        k_tile = tiles.k.wait(step + 1, n_own > 1)
        for i in range(1, n_own):
            if TAKE_TURNS:
                await_turn(tiles, blocks, WHO)
                blocks += 1
            product = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            weighted = warpgroup_mma(p, tiles.v.wait(step), acc, is_async=True)
            if TAKE_TURNS:
                pass_turn(tiles, WHO)
            scores = warpgroup_mma_wait(1, (product,))
            tiles.k.release(step + 1)
            key_tile = n_key_tiles - 1 - i
            needs_mask = key_tile >= n_clear
            if starts is not None:
                needs_mask = needs_mask | (key_tile <= last_document)
            if needs_mask:
                scores = masked(plan, starts, batch, scores, queries, key_tile * BLOCK_K + columns)
            next_p, row_max, row_sums, rescale = online_softmax(scores, row_max, row_sums, scale_log2)
            next_p = gl.convert_layout(next_p.to(dtype), p_layout)
            # Asked for early, because ptxas moves the wait for O up to the last branch: before the softmax, otherwise.
            k_tile = tiles.k.wait(step + 2, i + 1 < n_own)
            # p is listed so that its registers stay untouched while the matmul that reads them is in flight.
            acc, p = warpgroup_mma_wait(0, (weighted, p))
            tiles.v.release(step)
            acc = rescaled(acc, gl.convert_layout(rescale, o_rows))
            p = next_p
            step += 1

        tiles.q.release(q_step)
        weighted = warpgroup_mma(p, tiles.v.wait(step), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (weighted,))
        tiles.v.release(step)
        step += 1
        if starts is not None:  # loaded again, as the loop has no register to keep it in
            first_loaded = plan.document_tile(starts, batch, first_query - WHO * ROWS)
            for _ in range(first_loaded, n_key_tiles - n_own):
                let_go(tiles, step)
                step += 1
                if TAKE_TURNS:
                    await_turn(tiles, blocks, WHO)
                    pass_turn(tiles, WHO)
                    blocks += 1

        row_sum = gl.convert_layout(gl.sum(row_sums, 1), rows)
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # saw no key: acc is 0 and row_max -inf, which is the answer
        lse_row = lse + (batch * plan.n_heads + head).to(gl.int64) * plan.n_queries
        gl.store(lse_row + queries, (row_max + gl.log2(row_sum)) * LN_2, mask=queries < plan.n_queries)
        acc = acc * gl.convert_layout(1.0 / row_sum, o_rows)[:, None]
        tma.store_wait(0)  # the previous item's tile has been copied out of shared memory
        o_tile.store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o, [batch, head, first_query, 0], o_tile)
        position = announced(tiles.items, turn)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["group", "section_heads"])  # a 1 would become a constant, which a Plan cannot hold
def hopper_forward_kernel(
    q, k, v, o, lse, taken, starts, group, section_heads, scale_log2, CAUSAL: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """o (B, H, Q, D) and lse (B, H, Q); each program owns one query tile at a time.

    ``starts`` (B, Q) int32 holds the first key of each query's document; None without documents.
    """
    BLOCK_K: gl.constexpr = k.block_shape[2]
    BLOCK_D: gl.constexpr = k.block_shape[3]
    dtype: gl.constexpr = k.dtype
    plan = QueryPlan(  # type: ignore[call-arg]
        q.shape[2], k.shape[2], q.shape[1], q.shape[0] * q.shape[1], group, section_heads,
        CAUSAL, CONSUMERS * ROWS, BLOCK_K,
    )  # fmt: skip
    q_tiles = make_ring(dtype, ROWS, BLOCK_D, 2 * CONSUMERS, 1)
    turns = q_tiles.full  # where nobody takes turns: barriers of their own, made and never used, would lie under a tile
    if TAKE_TURNS:
        turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.init(turns.index(consumer), count=1)
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
                (forward_consumer, (plan, o, lse, starts, tiles, scale_log2, 0, TAKE_TURNS)),
                (forward_consumer, (plan, o, lse, starts, tiles, scale_log2, 1, TAKE_TURNS)),
                (forward_producer, (plan, q, k, v, taken, starts, tiles)),
            ],
            [4, 1],
            [WORKER_REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (forward_consumer, (plan, o, lse, starts, tiles, scale_log2, 0, TAKE_TURNS)),
                (forward_consumer, (plan, o, lse, starts, tiles, scale_log2, 1, TAKE_TURNS)),
                (forward_consumer, (plan, o, lse, starts, tiles, scale_log2, 2, TAKE_TURNS)),
                (forward_producer, (plan, q, k, v, taken, starts, tiles)),
            ],
            [4, 4, 1],
            [WORKER_REGISTERS, WORKER_REGISTERS, 32],
        )


@lru_cache(maxsize=MAX_REMEMBERED)
def _prepared(
    shape_BHQD: tuple[int, ...],
    shape_BKND: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    scale: float,
    packed: bool,
    schedule: ForwardSchedule | None,
) -> Prepared | None:
    """A launch that takes the addresses of q, k, v, o, lse, a counter and, if ``packed``, starts; None if q, k or v
    cannot be copied.

    The arguments are all that a launch depends on besides addresses, which are aligned; ``strides`` are of q, k and v.
    """
    operands = [(shape, of, dtype) for shape, of in zip((shape_BHQD, shape_BKND, shape_BKND), strides, strict=True)]
    if not all(can_be_copied(*operand) for operand in operands):
        return None
    q, k, v = operands
    o = (shape_BHQD, host.result_strides(*q), dtype)
    batch, n_heads, n_queries, d_head = shape_BHQD
    n_kv_heads, n_keys = shape_BKND[1:3]
    block_d = padded_head_dim(d_head)
    schedule = schedule or forward_schedule(block_d, n_queries)
    group = n_heads // n_kv_heads
    keys_and_values = 2 * n_keys * d_head * dtype.itemsize
    rows, keys = (1, 1, ROWS.value, block_d), (1, 1, schedule.block_k, block_d)
    items = ceil_div(n_queries, ROWS.value * schedule.consumers) * batch * n_heads
    return Prepared(
        hopper_forward_kernel,
        min(items, n_multiprocessors(device)),
        descriptor(*q, rows),
        descriptor(*k, keys),
        descriptor(*v, keys),
        descriptor(*o, rows),
        example(torch.float32),
        example(torch.int32),
        example(torch.int32) if packed else None,
        group,
        host.section_heads(keys_and_values, batch * n_kv_heads) * group,
        scale * LOG2_E.value,
        CAUSAL=causal,
        CONSUMERS=schedule.consumers,
        STAGES=schedule.stages,
        TAKE_TURNS=schedule.take_turns,
        WORKER_REGISTERS=schedule.worker_registers,
        num_warps=4,
        maxnreg=MAX_REGISTERS_WITH[schedule.consumers],
    )


def launch_forward(
    q_BHQD: Tensor,
    k_BKND: Tensor,
    v_BKND: Tensor,
    causal: bool,
    scale: float,
    schedule: ForwardSchedule | None = None,
    starts_BQ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o (B, H, Q, D) as ``empty_result`` lays it out, and lse (B, H, Q) in fp32; ``schedule`` overrides the table's.

    Launched on the current device, which must be the tensors'.
    """
    shape, device = q_BHQD.shape, q_BHQD.device
    if shape[0] == 0:
        return host.empty_result(q_BHQD), torch.empty(shape[:3], dtype=torch.float32, device=device)
    strides = q_BHQD.stride(), k_BKND.stride(), v_BKND.stride()
    packed = starts_BQ is not None
    starts_BQ = None if starts_BQ is None else host.aligned(starts_BQ)
    run = _prepared(shape, k_BKND.shape, strides, q_BHQD.dtype, device, causal, scale, packed, schedule)
    q, k, v = q_BHQD.data_ptr(), k_BKND.data_ptr(), v_BKND.data_ptr()
    if run is None or (q | k | v) % host.ALIGNMENT_BYTES:
        q_BHQD, k_BKND, v_BKND = map(host.copyable, (q_BHQD, k_BKND, v_BKND))
        return launch_forward(q_BHQD, k_BKND, v_BKND, causal, scale, schedule, starts_BQ)
    o = torch.empty_like(q_BHQD)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
    stream = host.current_stream(device)
    documents = () if starts_BQ is None else (starts_BQ.data_ptr(),)
    run(stream, q, k, v, o.data_ptr(), lse.data_ptr(), host.counter(device, stream).data_ptr(), *documents)
    return o, lse
