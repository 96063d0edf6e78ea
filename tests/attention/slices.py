"""Gradients written into slices of one matrix: the bits that an operator allocates, and nothing beside them."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels.against_fp64 import random

MARGIN = 16
"""Columns on either side of the matrix; whole 16 bytes in every dtype."""


def heads_of(matrix_BSP: Tensor, n_heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of q | k | v: views (B, H, S, E) and (B, K, S, E)."""
    n_all = n_heads + 2 * kv_heads
    heads = matrix_BSP.unflatten(-1, (n_all, matrix_BSP.shape[-1] // n_all)).transpose(1, 2)
    q, k, v = heads.split((n_heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def check_slices(
    forward: Callable[..., tuple[Tensor, Tensor]],
    allocating: Callable[..., tuple[Tensor, ...]],
    writing: Callable[..., None],
    device: str,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seq_len: int,
    d_head: int,
) -> None:
    """Two backwards of one attention, called with its tensors, for ``writing`` dq, dk and dv too, causal and scale."""
    shape = (batch, seq_len, (heads + 2 * kv_heads) * d_head)
    q, k, v = heads_of(random(shape, device, dtype, 0), heads, kv_heads)
    do = random((batch, seq_len, heads, d_head), device, dtype, 1).transpose(1, 2)
    scale = d_head**-0.5
    o, lse = forward(q, k, v, True, scale)
    assert o.transpose(1, 2).is_contiguous()
    expected = allocating(q, k, v, o, lse, do, True, scale)
    for inside in ({0}, {1}, {2}, {0, 1, 2}):
        frame = torch.full((batch, seq_len + 2, shape[-1] + 2 * MARGIN), float("nan"), dtype=dtype, device=device)
        slices = heads_of(frame[:, 1:-1, MARGIN:-MARGIN], heads, kv_heads)
        into = [slices[i] if i in inside else torch.empty_like(expected[i]) for i in range(3)]
        writing(q, k, v, o, lse, do, *into, True, scale)
        for written, wanted in zip(into, expected, strict=True):
            assert torch.equal(written, wanted)
        for i in inside:
            slices[i].fill_(float("nan"))
        assert frame.isnan().all(), inside
