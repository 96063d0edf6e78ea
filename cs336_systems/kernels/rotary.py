"""Rotary position embedding: rotates each head's pairs (x[i], x[i + E/2]) by their position's angle.

Formula (Su et al. 2021, eq. 34, half-split layout), for a head of E elements at position s and i < E/2:

    y[i]       = x[i] cos[s, i] - x[i + E/2] sin[s, i]
    y[i + E/2] = x[i + E/2] cos[s, i] + x[i] sin[s, i]

Backward is the inverse rotation: the same kernel with -sin. It needs no activation.

Method: the heads of all tokens form one list, token by token, with any strides; a program rotates a block of that list.
So it rotates q and k in place in a merged (q | k | v) matrix without touching v. The heads of one token in a program
load its angles once. The same pass optionally computes the absmax of q, k and v (``absmax.py``); then v is read too.

Rounding: bit-identical to the reference: in fp32, the products and the sum are rounded separately (no fused
multiply-add), then the result once to the dtype. In backward, the bf16 reference also rounds each of the two products
that autograd adds; this kernel rounds only the sum.

Traffic: reads and writes each rotated element once, and reads the angles, 4 E bytes per position. With three FLOPs per
element, it is memory-bound.

Limits: fp32, bf16 and fp16, angles in fp32; no autograd; fewer than 2^31 heads in total. 16-byte loads need E to be a
multiple of 16.

    rotate_(qkv, cos, sin, n_heads, n_kv_heads)
    rotate_(dqkv, cos, sin, n_heads, n_kv_heads, inverse=True)       # its backward

Shape legend: B batch, S sequence, H query heads, K key/value heads, E d_head; W = (H + 2 K) E.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.absmax import check_absmax, magnitude_bits, raise_absmax
from cs336_systems.kernels.launching import ceil_div, check_runnable, launch, next_power_of_2

BLOCK_PAIRS = 1024
"""Pairs per program: each of its 128 threads loads 16 bytes of the first halves of bf16 heads and 16 of the second."""


@triton.jit
def rotary_kernel(
    x, out, cos, sin, stride_xb, stride_xh, stride_xs, stride_ob, stride_oh, stride_os, absmax, n_heads, n_rotated,
    n_positions, n_vectors,
    HALF: tl.constexpr, INVERSE: tl.constexpr, WITH_ABSMAX: tl.constexpr, BLOCK_VECTORS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotate the n_vectors = B S H heads of x into out, which may be x; cos, sin (n_positions, HALF) are contiguous.

    If WITH_ABSMAX, only the first n_rotated heads of a token are rotated, and the others are only read.
    """
    vectors = tl.program_id(0) * BLOCK_VECTORS + tl.arange(0, BLOCK_VECTORS)
    tokens = vectors // n_heads
    batch, position = (tokens // n_positions).to(tl.int64), (tokens % n_positions).to(tl.int64)
    head = (vectors % n_heads).to(tl.int64)  # all three int64, because offsets pass 2^31 elements
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (vectors < n_vectors)[:, None] & (pairs < HALF)

    angle_at = position[:, None] * HALF + pairs
    cosine = tl.load(cos + angle_at, mask=inside, other=0.0)
    sine = tl.load(sin + angle_at, mask=inside, other=0.0)
    if INVERSE:
        sine = -sine
    x_at = (batch * stride_xb + head * stride_xh + position * stride_xs)[:, None] + pairs
    first = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + x_at + HALF, mask=inside, other=0.0).to(tl.float32)
    out_at = (batch * stride_ob + head * stride_oh + position * stride_os)[:, None] + pairs
    first_out, second_out = first * cosine - second * sine, second * cosine + first * sine
    if WITH_ABSMAX:
        rotated = (head < n_rotated)[:, None]
        bits = tl.maximum(
            magnitude_bits(tl.where(rotated, first_out, first)), magnitude_bits(tl.where(rotated, second_out, second))
        )
        raise_absmax(absmax, bits, out.dtype.element_ty)
        inside = inside & rotated
    tl.store(out + out_at, first_out, mask=inside)
    tl.store(out + out_at + HALF, second_out, mask=inside)


def rotate_(
    qkv: Tensor,
    cos_SE2: Tensor,
    sin_SE2: Tensor,
    n_heads: int,
    n_kv_heads: int,
    inverse: bool = False,
    absmax: Tensor | None = None,
) -> None:
    """Rotate q and k in place in each row (q | k | v) of qkv: (B, S, W) or (tokens, W), contiguous.

    Without autograd. v is not written, and it is read only for absmax.

    Args:
        cos_SE2, sin_SE2: (S, E/2), fp32. Row r has position r % S; tokens are whole sequences.
        n_heads, n_kv_heads: H and K, so that W = (H + 2 K) E; one is 0 for rows with only k | v, or only q.
        inverse: rotate by the negative angles, which is also the backward of a gradient.
        absmax: one fp32 element, which is raised to the largest magnitude of the rotated qkv, including v.

    Raises:
        ValueError: invalid shapes, strides, dtypes (qkv must be fp32, bf16 or fp16) or devices, or no CUDA device.
    """
    if min(n_heads, n_kv_heads) < 0 or n_heads + n_kv_heads == 0 or cos_SE2.dim() != 2:
        raise ValueError(f"needs heads and cos (S, E/2), got {n_heads}, {n_kv_heads} and {tuple(cos_SE2.shape)}")
    n_positions, half = cos_SE2.shape
    width = (n_heads + 2 * n_kv_heads) * 2 * half
    if qkv.dim() not in (2, 3) or not n_positions or qkv.shape[-2] % n_positions or qkv.shape[-1] != width:
        asked = f"{n_heads} + 2 x {n_kv_heads} heads and cos {tuple(cos_SE2.shape)}"
        raise ValueError(f"qkv {tuple(qkv.shape)} has no rows of {width} for whole sequences, as {asked} ask")
    if not qkv.is_contiguous():
        raise ValueError(f"qkv is overwritten and must be contiguous, got strides {qkv.stride()}")
    for name, table in (("cos", cos_SE2), ("sin", sin_SE2)):
        if table.shape != cos_SE2.shape or table.dtype != torch.float32 or table.device != qkv.device:
            got = f"{table.dtype} {tuple(table.shape)} on {table.device}"
            raise ValueError(f"{name} must be float32 {tuple(cos_SE2.shape)} on {qkv.device}, got {got}")
    check_runnable(rotary_kernel, qkv)
    check_absmax(absmax, qkv)
    n_rotated = n_heads + n_kv_heads
    n_read = n_rotated if absmax is None else n_rotated + n_kv_heads
    n_vectors = qkv.shape[:-1].numel() * n_read
    strides = (n_positions * width, 2 * half, width)
    block_half = next_power_of_2(half)
    block_vectors = max(1, BLOCK_PAIRS // block_half)
    launch(
        rotary_kernel,
        (ceil_div(n_vectors, block_vectors),),
        *(qkv, qkv, cos_SE2.contiguous(), sin_SE2.contiguous(), *strides, *strides),
        *(qkv if absmax is None else absmax, n_read, n_rotated, n_positions, n_vectors),
        HALF=half,
        INVERSE=inverse,
        WITH_ABSMAX=absmax is not None,
        BLOCK_VECTORS=block_vectors,
        BLOCK_HALF=block_half,
        enable_fp_fusion=False,
    )
