"""Rotary positions in place in q | k | v: the reference's bits, the way back, and what must be refused."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.rotary import rotate_
from cs336_systems.model import ops
from tests.kernels.against_fp64 import PLACES, check, check_refused, random

MERGED = [(1, 3, 2, 1, 80), (2, 3, 5, 5, 6), (1, 1, 1, 1, 2), (0, 4, 2, 1, 8)]
"""(B, S, H, K, E)"""


def angles(n_positions: int, d_head: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin (S, E/2) of theta 100."""
    frequencies = 100.0 ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    table = torch.outer(torch.arange(n_positions, dtype=torch.float64), frequencies)
    return table.cos().float().to(device), table.sin().float().to(device)


def split(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, ...]:
    """q, k, v (B, heads, S, E) as views of qkv (B, S, W)."""
    heads = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1)).transpose(1, 2)
    return heads.split((n_heads, n_kv_heads, n_kv_heads), dim=1)


@pytest.mark.parametrize(("shape", "flat"), [(shape, i % 2 == 0) for i, shape in enumerate(MERGED)], ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_references_bits_its_gradient_and_the_way_back(
    shape: tuple[int, ...], flat: bool, device: str, dtype: torch.dtype
) -> None:
    batch, n_positions, n_heads, n_kv_heads, d_head = shape
    qkv = random((batch, n_positions, (n_heads + 2 * n_kv_heads) * d_head), device, dtype)
    tables = angles(n_positions + 3, d_head, device)
    cos, sin = (torch.cat((table, table), dim=1)[3:, d_head // 2 :] for table in tables)  # strided, from position 3 on
    q, k, v = split(qkv, n_heads, n_kv_heads)
    written = qkv.clone()
    rows = written.flatten(0, 1) if flat else written
    rotate_(rows, cos, sin, n_heads, n_kv_heads)
    expected = ops.rotary(q, cos, sin), ops.rotary(k, cos, sin), v
    for found, other in zip(split(written, n_heads, n_kv_heads), expected, strict=True):
        assert torch.equal(found, other)
    for first, *heads in ((0, n_heads, 0), (n_heads * d_head, 0, n_kv_heads)):
        part = rows[..., first : first + (heads[0] + 2 * heads[1]) * d_head]
        alone = qkv.view_as(rows)[..., first : first + part.shape[-1]].clone(memory_format=torch.contiguous_format)
        rotate_(alone, cos, sin, *heads)
        assert torch.equal(alone, part)

    back = qkv.clone()
    rotate_(back.flatten(0, 1) if flat else back, cos, sin, n_heads, n_kv_heads, inverse=True)
    for found, dy in zip(split(back, n_heads, n_kv_heads)[:2], (q, k), strict=True):
        leaves = [dy.to(wide, copy=True).requires_grad_() for wide in (dtype, torch.float64)]
        tables = [(table.to(torch.promote_types(leaf.dtype, torch.float32)) for table in (cos, sin)) for leaf in leaves]
        outs = [ops.rotary(leaf, *own) for leaf, own in zip(leaves, tables, strict=True)]
        check("dx", found, *(torch.autograd.grad(y, x, dy.to(x.dtype))[0] for y, x in zip(outs, leaves, strict=True)))
    rotate_(rows, cos, sin, n_heads, n_kv_heads, inverse=True)
    # Each way rounds a pair, of length sqrt(2) max|x| at most, to the dtype, after a few smaller roundings in fp32.
    bound = 6 * torch.finfo(dtype).eps * qkv.abs().max().item() if qkv.numel() else 0.0
    torch.testing.assert_close(written, qkv, rtol=0, atol=bound)


def test_refusals() -> None:
    cos, sin = angles(5, 8, "cpu")
    qkv = torch.zeros(2, 5, 32)
    check_refused(
        (lambda: rotate_(qkv, cos, sin[:, :3], 2, 1), r"sin .* \(5, 3\)"),
        (lambda: rotate_(qkv, cos.bfloat16(), sin, 2, 1), r"cos .* torch.bfloat16"),
        (lambda: rotate_(qkv.double(), cos, sin, 2, 1), "torch.float64"),
        *(
            (lambda s=s: rotate_(torch.zeros(s), cos, sin, 2, 1), str(s[-1]))
            for s in ((2, 6, 32), (12, 32), (2, 5, 40))
        ),
        *((lambda h=h: rotate_(torch.zeros(5, 16), cos, sin, *h), f"{h[0]}, {h[1]}") for h in ((2, -1), (0, 0))),
        (lambda: rotate_(torch.zeros(32, 5).t(), cos, sin, 2, 1), r"contiguous, got strides \(1, 5\)"),
    )
