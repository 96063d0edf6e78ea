"""FlashAttention backward on Hopper: the launcher of its three kernels, with cached launches.

Shape legend: B batch, H query heads, K key/value heads, Q queries, N keys, D head dim.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cs336_systems.attention.hopper import host
from cs336_systems.attention.hopper.backward_kernel import hopper_backward_kernel
from cs336_systems.attention.hopper.passes import PADDED_ROWS, prepare_postprocess, prepare_preprocess
from cs336_systems.attention.hopper.primitives import LOG2_E, ROWS, STATISTICS
from cs336_systems.attention.hopper.schedules import BACKWARD, MAX_REGISTERS_WITH, BackwardSchedule, padded_head_dim
from cs336_systems.attention.shapes import ends_of
from cs336_systems.kernels.copy_engine import can_be_copied, descriptor, example
from cs336_systems.kernels.launching import MAX_REMEMBERED, Prepared, ceil_div, n_multiprocessors

ORDERED_HEADS = 8
"""The least number of key/value heads per section if dq is summed in order: the longest key tiles then come last, and
those of several heads end at about the same time."""


@dataclass(frozen=True)
class Launches:
    """Launches of the three kernels for tensors of one form, and the fp32 words of memory that they share."""

    preprocess: Prepared
    """Takes the addresses of o, do, lse, stats and sums of dq."""
    main: Prepared
    """Takes the addresses of q, k, v, do, stats, sums of dq, dk, dv, turns, a counter and, if packed, ends."""
    postprocess: Prepared
    """Takes addresses as ``prepare_postprocess`` says."""
    n_stats: int
    n_sums: int
    n_turns: int
    """The number of tiles of dq, if their sums are in order."""


@lru_cache(maxsize=MAX_REMEMBERED)
def _prepared(
    shape_BHQD: tuple[int, ...],
    shape_BKND: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    scale: float,
    ordered: bool,
    packed: bool,
    rotated: bool,
    noted: bool,
    schedule: BackwardSchedule | None,
) -> Launches | None:
    """The three launches, or None if the copy engine cannot read or write a tensor with these strides.

    The launches depend on these arguments and on addresses, which must be aligned; ``strides`` are those of q, k, v, o,
    do, dq, dk and dv.
    """
    like_q, like_k = shape_BHQD, shape_BKND
    shapes = like_q, like_k, like_k, like_q, like_q, like_q, like_k, like_k
    tensors = [(shape, of, dtype) for shape, of in zip(shapes, strides, strict=True)]
    if not all(can_be_copied(*tensor) for tensor in tensors):
        return None
    q, k, v, _, do, _, dk, dv = tensors
    batch, n_heads, n_queries, d_head = shape_BHQD
    n_kv_heads, n_keys = shape_BKND[1:3]
    block_d = padded_head_dim(d_head)
    schedule = schedule or BACKWARD[block_d]
    padded = ceil_div(n_queries, PADDED_ROWS) * PADDED_ROWS
    group = n_heads // n_kv_heads
    queries, keys, half_keys = ((1, 1, rows, block_d) for rows in (schedule.block_q, schedule.block_k, ROWS.value))
    rows = batch * n_heads * padded
    stats_shape, sums_shape = (rows, STATISTICS.value), (rows * block_d // 32, 32)
    # A head reads q and do and adds to dq, which has twice their bytes.
    queries_bytes = group * n_queries * d_head * (2 * dtype.itemsize + torch.float32.itemsize)
    items = ceil_div(n_keys, schedule.block_k) * batch * n_kv_heads
    n_programs = n_multiprocessors(device)
    section_heads = host.section_heads(queries_bytes, batch * n_kv_heads)
    if ordered:
        section_heads = min(max(section_heads, ORDERED_HEADS), batch * n_kv_heads)
    else:
        unseen = [max(key - (n_keys - n_queries), 0) * causal for key in range(0, n_keys, schedule.block_k)]
        steps = [ceil_div(n_queries, schedule.block_q) - first // schedule.block_q for first in unseen]
        section_heads = host.balanced_section(steps, batch * n_kv_heads, section_heads, n_programs)
    main = Prepared(
        hopper_backward_kernel,
        min(items, n_programs),
        descriptor(*q, queries),
        descriptor(*k, keys),
        descriptor(*v, keys),
        descriptor(*do, queries),
        descriptor(stats_shape, (STATISTICS.value, 1), dtype, (schedule.block_q, STATISTICS.value)),
        descriptor(sums_shape, (32, 1), torch.float32, (schedule.block_q * block_d // 2 // 32, 32)),
        descriptor(*dk, half_keys),
        descriptor(*dv, half_keys),
        example(torch.int32),
        example(torch.int32),
        example(torch.int32) if packed else None,
        group,
        section_heads,
        padded,
        scale,
        scale * LOG2_E.value,
        CAUSAL=causal,
        STAGES=schedule.stages,
        KEY_STAGES=schedule.key_stages,
        ORDERED=ordered,
        LATE_DQ=schedule.late_dq,
        LEFT_IN_REGISTERS=schedule.left_in_registers,
        STATISTICS_LAST=schedule.statistics_last,
        num_warps=4,
        maxnreg=MAX_REGISTERS_WITH[2],
        launch_cooperative_grid=ordered,  # its programs wait for each other
    )
    return Launches(
        prepare_preprocess(shape_BHQD, strides[3], strides[4], dtype, padded, block_d, scale),
        main,
        prepare_postprocess(shape_BHQD, n_kv_heads, strides[5:], dtype, padded, block_d, scale, rotated, noted),
        math.prod(stats_shape) * dtype.itemsize // torch.float32.itemsize,
        math.prod(sums_shape),
        2 * rows // schedule.block_q,
    )


def launch_backward(
    q_BHQD: Tensor,
    k_BKND: Tensor,
    v_BKND: Tensor,
    o_BHQD: Tensor,
    lse_BHQ: Tensor,
    do_BHQD: Tensor,
    dq_BHQD: Tensor,
    dk_BKND: Tensor,
    dv_BKND: Tensor,
    causal: bool,
    scale: float,
    ordered: bool = False,
    schedule: BackwardSchedule | None = None,
    starts_BQ: Tensor | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    absmax: Tensor | None = None,
) -> None:
    """Write dq, dk and dv; ``ordered`` sums dq from the last key tile to the first, ``starts_BQ`` masks documents.

    With ``rotation``, cos and sin (Q, D / 2) in fp32, dq and dk are the gradients of q and k before ``rotary.rotate_``,
    and ``absmax`` is raised to the largest magnitude of dq, dk and dv.

    Inputs that the copy engine cannot read in place are copied first. Outputs that it cannot write in place (strides of
    batch, head and sequence that are not positive multiples of 16 bytes, a last stride other than 1, a first element
    that is not 16-byte aligned) are written to a buffer and copied.

    ``schedule`` overrides the table's. The current device must be that of the tensors.
    """
    shape, device = q_BHQD.shape, q_BHQD.device
    if shape[0] == 0:
        return
    strides = (
        q_BHQD.stride(), k_BKND.stride(), v_BKND.stride(), o_BHQD.stride(), do_BHQD.stride(),
        dq_BHQD.stride(), dk_BKND.stride(), dv_BKND.stride(),
    )  # fmt: skip
    how = causal, scale, ordered, starts_BQ is not None, rotation is not None, absmax is not None, schedule
    launches = _prepared(shape, k_BKND.shape, strides, q_BHQD.dtype, device, *how)
    q, k, v = q_BHQD.data_ptr(), k_BKND.data_ptr(), v_BKND.data_ptr()
    o, do = o_BHQD.data_ptr(), do_BHQD.data_ptr()
    dq, dk, dv = dq_BHQD.data_ptr(), dk_BKND.data_ptr(), dv_BKND.data_ptr()
    if launches is None or (q | k | v | o | do | dq | dk | dv) % host.ALIGNMENT_BYTES:
        gradients = dq_BHQD, dk_BKND, dv_BKND
        q_BHQD, k_BKND, v_BKND, o_BHQD, do_BHQD = map(host.copyable, (q_BHQD, k_BKND, v_BKND, o_BHQD, do_BHQD))
        written = dq_BHQD, dk_BKND, dv_BKND = [host.writable(x) for x in gradients]
        launch_backward(
            q_BHQD, k_BKND, v_BKND, o_BHQD, lse_BHQ, do_BHQD, dq_BHQD, dk_BKND, dv_BKND,
            causal, scale, ordered, schedule, starts_BQ, rotation, absmax,
        )  # fmt: skip
        for gradient, elsewhere in zip(gradients, written, strict=True):
            if elsewhere is not gradient:
                gradient.copy_(elsewhere)
        return
    lse_BHQ = host.aligned(lse_BHQ)
    between = torch.empty(launches.n_stats + launches.n_sums, dtype=torch.float32, device=device)
    stats = between.data_ptr()
    sums = stats + launches.n_stats * between.element_size()
    stream = host.current_stream(device)
    counter = turns = host.counter(device, stream)
    if ordered:
        turns = torch.zeros(launches.n_turns, dtype=torch.int32, device=device)
    launches.preprocess(stream, o, do, lse_BHQ.data_ptr(), stats, sums)
    ends_BN = None if starts_BQ is None else ends_of(starts_BQ, k_BKND.shape[2])
    documents = () if ends_BN is None else (ends_BN.data_ptr(),)
    launches.main(stream, q, k, v, do, stats, sums, dk, dv, turns.data_ptr(), counter.data_ptr(), *documents)
    if rotation is None:
        launches.postprocess(stream, sums, dq)
        return
    cos, sin = map(host.aligned, rotation)
    noted = () if absmax is None else (absmax.data_ptr(),)
    launches.postprocess(stream, sums, dq, dk, dv, cos.data_ptr(), sin.data_ptr(), *noted)
