"""RMSNorm of every head of queries and keys, and the rotation to their positions, in one pass (Qwen3's QK-norm).

Formula, for a head x of E elements at position s, with a gain (E) that all heads of q share, and another for k:

    rstd = 1 / sqrt(mean x^2 + eps)
    n    = x rstd gain
    y    = n rotated by the angles of s            (``rotary.py``)

and backward, where g is dy rotated back:

    dgain = sum over heads of g x rstd
    dx    = rstd (g gain - x rstd mean(g gain x rstd))

Method: as in ``rotary.py``, the heads of all tokens are one list, and a program holds a block of whole heads in
registers. In backward a program's heads are all of q or all of k; it walks over its blocks, keeps its sum for dgain in
registers, and writes it once, into its own row of an fp32 buffer. No atomics: the same bits in every run on one device.

Rounding: forward rounds where ``model.ops.rms_norm`` and ``model.ops.rotary`` do: x rstd, n, and y. Backward computes
in fp32 and rounds each of its results once.

Traffic, in passes over q | k: forward 2 (reads x, writes y), backward 3 (reads dy and x, writes dx over dy). The bound
is memory.

Limits: fp32, bf16 and fp16, one dtype for all but the angles, which are fp32; fewer than 2^31 heads in total.

    qk = norm_rotate(qkv, q_gain, k_gain, eps, cos, sin, n_heads, n_kv_heads)
    dq_gain, dk_gain = norm_rotate_backward_(dqkv, qkv, q_gain, k_gain, eps, cos, sin, n_heads, n_kv_heads)

Shape legend: R = B S tokens, H query heads, K key/value heads, E d_head; W >= (H + K) E is the width of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.launching import (
    ceil_div,
    check_alike,
    check_runnable,
    launch,
    n_multiprocessors,
    next_power_of_2,
)

BLOCK_PAIRS = 1024
"""Pairs of elements that a program holds at once: 16 bytes of each half of a bf16 head for each of its 128 threads."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs of backward: eight of four warps fit a multiprocessor's registers at 64 for each thread."""


@triton.jit
def _load_pair(pointer, at, HALF: tl.constexpr, mask):
    """Both halves of heads, in fp32."""
    first = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + at + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _inverse_rms(first, second, eps, HALF: tl.constexpr):
    """1 / sqrt(mean x^2 + eps) of each head, (BLOCK_VECTORS, 1)."""
    squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
    return tl.rsqrt(squares / (2 * HALF) + eps)


@triton.jit
def norm_rotate_kernel(
    x, out, q_gain, k_gain, cos, sin, stride_x, eps, n_query_heads, n_heads, n_positions, n_vectors,
    HALF: tl.constexpr, BLOCK_VECTORS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Contiguous out (R, n_heads E) from the first n_heads heads of the rows of x, which lie stride_x apart."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    vectors = tl.program_id(0) * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
    tokens, head = (vectors // n_heads).to(tl.int64), (vectors % n_heads).to(tl.int64)
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (vectors < n_vectors)[:, None] & (pairs < HALF)
    cosine = tl.load(cos + (tokens % n_positions)[:, None] * HALF + pairs, mask=inside, other=0.0)
    sine = tl.load(sin + (tokens % n_positions)[:, None] * HALF + pairs, mask=inside, other=0.0)
    first, second = _load_pair(x, (tokens * stride_x + head * 2 * HALF)[:, None] + pairs, HALF, inside)
    is_query = (head < n_query_heads)[:, None]
    q_first, q_second = _load_pair(q_gain, pairs, HALF, pairs < HALF)
    k_first, k_second = _load_pair(k_gain, pairs, HALF, pairs < HALF)
    rstd = _inverse_rms(first, second, eps, HALF)
    first = (first * rstd).to(DTYPE).to(tl.float32) * tl.where(is_query, q_first, k_first)
    second = (second * rstd).to(DTYPE).to(tl.float32) * tl.where(is_query, q_second, k_second)
    first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
    out_at = (vectors.to(tl.int64) * 2 * HALF)[:, None] + pairs
    tl.store(out + out_at, first * cosine - second * sine, mask=inside)
    tl.store(out + out_at + HALF, second * cosine + first * sine, mask=inside)


@triton.jit
def norm_rotate_backward_kernel(
    d, x, q_gain, k_gain, cos, sin, partial_dgain, stride_d, stride_x, eps, n_query_heads, n_key_heads,
    n_query_programs, n_positions, n_tokens,
    HALF: tl.constexpr, BLOCK_VECTORS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """The first n_query_programs programs walk over the heads of q, the rest over those of k.

    In rows of d, which lie stride_d apart, the gradient of y becomes that of x; a program's row of partial_dgain
    (programs, E), fp32, becomes the sum for its gain.
    """
    program, n_programs = tl.program_id(0), n_query_programs
    n_heads, first_head, gain = n_query_heads, 0, q_gain
    if program >= n_query_programs:
        n_heads, first_head, gain = n_key_heads, n_query_heads, k_gain
        n_programs = tl.num_programs(0) - n_query_programs
        program -= n_query_programs
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    gain_first, gain_second = _load_pair(gain, pairs, HALF, pairs < HALF)
    dgain_first = tl.zeros((BLOCK_VECTORS, BLOCK_HALF), dtype=tl.float32)
    dgain_second = tl.zeros((BLOCK_VECTORS, BLOCK_HALF), dtype=tl.float32)
    n_vectors = n_tokens * n_heads
    for block in range(program, tl.cdiv(n_vectors, BLOCK_VECTORS), n_programs):
        vectors = block * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
        tokens, head = (vectors // n_heads).to(tl.int64), first_head + (vectors % n_heads).to(tl.int64)
        exists = (vectors < n_vectors)[:, None]
        inside = exists & (pairs < HALF)
        cosine = tl.load(cos + (tokens % n_positions)[:, None] * HALF + pairs, mask=inside, other=0.0)
        sine = tl.load(sin + (tokens % n_positions)[:, None] * HALF + pairs, mask=inside, other=0.0)
        d_at = (tokens * stride_d + head * 2 * HALF)[:, None] + pairs
        dy_first, dy_second = _load_pair(d, d_at, HALF, inside)
        first, second = _load_pair(x, (tokens * stride_x + head * 2 * HALF)[:, None] + pairs, HALF, inside)
        # With eps = 0, heads that do not exist would send infinities to dgain.
        rstd = tl.where(exists, _inverse_rms(first, second, eps, HALF), 0.0)
        first, second = first * rstd, second * rstd
        g_first, g_second = dy_first * cosine + dy_second * sine, dy_second * cosine - dy_first * sine
        dn_first, dn_second = g_first * gain_first, g_second * gain_second
        along = tl.sum(dn_first * first + dn_second * second, axis=1, keep_dims=True) / (2 * HALF)
        tl.store(d + d_at, rstd * (dn_first - first * along), mask=inside)
        tl.store(d + d_at + HALF, rstd * (dn_second - second * along), mask=inside)
        dgain_first += g_first * first
        dgain_second += g_second * second
    at = tl.program_id(0) * 2 * HALF + tl.arange(0, BLOCK_HALF)
    exist = tl.arange(0, BLOCK_HALF) < HALF
    tl.store(partial_dgain + at, tl.sum(dgain_first, axis=0), mask=exist)
    tl.store(partial_dgain + at + HALF, tl.sum(dgain_second, axis=0), mask=exist)


def _block(half: int) -> tuple[int, int]:
    """(heads, pairs of each) that a program holds."""
    block_half = next_power_of_2(half)
    return max(1, BLOCK_PAIRS // block_half), block_half


def norm_rotate(
    qkv_RW: Tensor,
    q_gain_E: Tensor,
    k_gain_E: Tensor,
    eps: float,
    cos_SE2: Tensor,
    sin_SE2: Tensor,
    n_heads: int,
    n_kv_heads: int,
) -> Tensor:
    """q | k (R, (H + K) E): the first H + K heads of each row of qkv, each normed and rotated; without autograd.

    Args:
        qkv_RW: rows may be strided, elements are contiguous. Row r has position r % S; tokens are whole sequences.
        q_gain_E, k_gain_E: gains of the norms, shared by all heads of q, and of k.
        cos_SE2, sin_SE2: (S, E/2), fp32.
        n_heads, n_kv_heads: H and K; one of them may be 0, for rows of q, or of k | v, alone.

    Raises:
        ValueError: shapes, strides, dtypes (fp32, bf16 or fp16) or devices, or no CUDA device.
    """
    qkv, q_gain, k_gain, cos, sin = qkv_RW, q_gain_E, k_gain_E, cos_SE2, sin_SE2
    _check(qkv, q_gain, k_gain, cos, sin, n_heads, n_kv_heads)
    n_rotated, half = n_heads + n_kv_heads, cos.shape[1]
    out = qkv.new_empty(qkv.shape[0], n_rotated * 2 * half)
    n_vectors = qkv.shape[0] * n_rotated
    block_vectors, block_half = _block(half)
    launch(
        norm_rotate_kernel,
        (ceil_div(n_vectors, block_vectors),),
        *(qkv, out, q_gain.contiguous(), k_gain.contiguous(), cos.contiguous(), sin.contiguous()),
        *(qkv.stride(0), eps, n_heads, n_rotated, cos.shape[0], n_vectors),
        HALF=half,
        BLOCK_VECTORS=block_vectors,
        BLOCK_HALF=block_half,
        enable_fp_fusion=False,
    )
    return out


def norm_rotate_backward_(
    dqkv_RW: Tensor,
    qkv_RW: Tensor,
    q_gain_E: Tensor,
    k_gain_E: Tensor,
    eps: float,
    cos_SE2: Tensor,
    sin_SE2: Tensor,
    n_heads: int,
    n_kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """(dq_gain (E), dk_gain (E)), and in place, in the first H + K heads of each row of dqkv, the gradient of qkv.

    Args:
        dqkv_RW: in its first H + K heads, the gradient of ``norm_rotate``'s result; the rest (v's) is unchanged.
        qkv_RW: the argument of ``norm_rotate``, as are the other arguments.

    Raises:
        ValueError: as of ``norm_rotate``.
    """
    dqkv, qkv, q_gain, k_gain, cos, sin = dqkv_RW, qkv_RW, q_gain_E, k_gain_E, cos_SE2, sin_SE2
    for rows in (dqkv, qkv):
        _check(rows, q_gain, k_gain, cos, sin, n_heads, n_kv_heads)
    check_alike(dqkv=dqkv, qkv=qkv)
    if dqkv.shape[0] != qkv.shape[0]:
        raise ValueError(f"dqkv {tuple(dqkv.shape)} and qkv {tuple(qkv.shape)} differ in their number of rows")
    half, n_tokens = cos.shape[1], qkv.shape[0]
    block_vectors, block_half = _block(half)
    programs = 2 if qkv.is_cpu else PROGRAMS_PER_MULTIPROCESSOR * n_multiprocessors(qkv.device)
    share = ceil_div(programs * n_heads, n_heads + n_kv_heads)
    n_query_programs = min(share, ceil_div(n_tokens * n_heads, block_vectors))
    n_key_programs = min(programs, ceil_div(n_tokens * n_kv_heads, block_vectors))
    partial = torch.empty(n_query_programs + n_key_programs, 2 * half, dtype=torch.float32, device=qkv.device)
    launch(
        norm_rotate_backward_kernel,
        (n_query_programs + n_key_programs,),
        *(dqkv, qkv, q_gain.contiguous(), k_gain.contiguous(), cos.contiguous(), sin.contiguous(), partial),
        *(dqkv.stride(0), qkv.stride(0), eps, n_heads, n_kv_heads, n_query_programs, cos.shape[0], n_tokens),
        HALF=half,
        BLOCK_VECTORS=block_vectors,
        BLOCK_HALF=block_half,
        enable_fp_fusion=False,
    )
    dq_gain, dk_gain = (part.sum(0).to(q_gain.dtype) for part in partial.split((n_query_programs, n_key_programs)))
    return dq_gain, dk_gain


def _check(
    rows_RW: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int
) -> None:
    if min(n_heads, n_kv_heads) < 0 or n_heads + n_kv_heads == 0 or cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(f"needs heads and cos (S, E/2), got {n_heads}, {n_kv_heads} and {tuple(cos.shape)}")
    n_positions, half = cos.shape
    if rows_RW.dim() != 2 or rows_RW.shape[0] % n_positions or rows_RW.shape[1] < (n_heads + n_kv_heads) * 2 * half:
        raise ValueError(
            f"rows {tuple(rows_RW.shape)} are not (a multiple of {n_positions}, at least {n_heads} + {n_kv_heads} "
            f"heads of {2 * half})"
        )
    if rows_RW.stride(1) != 1:
        raise ValueError(f"elements of a row must be neighbours, got strides {rows_RW.stride()}")
    if any(gain.shape != (2 * half,) for gain in (q_gain, k_gain)):
        raise ValueError(f"gains must have {2 * half} elements, got {tuple(q_gain.shape)} and {tuple(k_gain.shape)}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"cos and sin must be float32, got {cos.dtype} and {sin.dtype}")
    check_alike(rows=rows_RW, q_gain=q_gain, k_gain=k_gain)
    check_runnable(norm_rotate_kernel, rows_RW)
