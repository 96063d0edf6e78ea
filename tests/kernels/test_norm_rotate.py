"""Norm and rotation of heads in one kernel: against fp64 and the reference, at awkward shapes and strides; refusals."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.norm_rotate import norm_rotate, norm_rotate_backward_
from cs336_systems.model import ops
from tests.kernels.against_fp64 import PLACES, check, random

from .test_rotary import angles, split

SHAPES = [(1, 3, 2, 1, 80), (2, 3, 5, 5, 6), (1, 1, 1, 1, 2), (3, 40, 2, 1, 8)]
"""(B, S, H, K, E); the last has more blocks of heads than backward has programs where it is interpreted."""
EPS = 1e-6


def by_autograd(
    shape: tuple[int, ...], qkv: Tensor, gains: list[Tensor], dy: Tensor, wide: torch.dtype
) -> list[Tensor]:
    """q | k, its gradients by qkv and by both gains, of the model's own operations."""
    batch, n_positions, n_heads, n_kv_heads, d_head = shape
    tables = [table.to(torch.promote_types(wide, torch.float32)) for table in angles(n_positions, d_head, qkv.device)]
    leaves = [tensor.to(wide, copy=True).requires_grad_() for tensor in (qkv, *gains)]
    q, k, _ = split(leaves[0].view(batch, n_positions, -1), n_heads, n_kv_heads)
    heads = [ops.rotary(ops.rms_norm(x, gain, EPS), *tables) for x, gain in zip((q, k), leaves[1:], strict=True)]
    y = torch.cat(heads, dim=1).transpose(1, 2).flatten(0, 1).flatten(1)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(wide))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    batch, n_positions, n_heads, n_kv_heads, d_head = shape
    rows, n_rotated = batch * n_positions, (n_heads + n_kv_heads) * d_head
    qkv = random((rows, n_rotated + n_kv_heads * d_head), device, dtype)
    gains, dy = [random((d_head,), device, dtype, seed) for seed in (1, 2)], random((rows, n_rotated), device, dtype, 3)
    how = *gains, EPS, *angles(n_positions, d_head, device)
    y = norm_rotate(qkv, *how, n_heads, n_kv_heads)
    dqkv = torch.cat((dy, qkv[:, n_rotated:]), dim=1)  # v stays as it is
    dgains = norm_rotate_backward_(dqkv, qkv, *how, n_heads, n_kv_heads)
    assert torch.equal(dqkv[:, n_rotated:], qkv[:, n_rotated:])
    dqkv[:, n_rotated:] = 0
    eager, exact = (by_autograd(shape, qkv, gains, dy, wide) for wide in (dtype, torch.float64))
    for name, found, *expected in zip(
        ("y", "dqkv", "dq_gain", "dk_gain"), (y, dqkv, *dgains), eager, exact, strict=True
    ):
        check(name, found, *expected)
    again = torch.cat((dy, qkv[:, n_rotated:]), dim=1)
    assert all(map(torch.equal, norm_rotate_backward_(again, qkv, *how, n_heads, n_kv_heads), dgains))

    # q and k | v apart, rows of the gradient as they lie in dqkv: the same bits.
    d_query, apart = n_heads * d_head, torch.cat((dy, qkv[:, n_rotated:]), dim=1)
    q, keys_values = qkv[:, :d_query].contiguous(), qkv[:, d_query:].contiguous()
    assert torch.equal(norm_rotate(q, *how, n_heads, 0), y[:, :d_query])
    assert torch.equal(norm_rotate(keys_values, *how, 0, n_kv_heads), y[:, d_query:])
    dq_gain, none = norm_rotate_backward_(apart[:, :d_query], q, *how, n_heads, 0)
    also_none, dk_gain = norm_rotate_backward_(apart[:, d_query:], keys_values, *how, 0, n_kv_heads)
    assert torch.equal(apart[:, :n_rotated], dqkv[:, :n_rotated])
    assert not none.any()
    assert not also_none.any()
    for name, found, together in (("dq_gain", dq_gain, dgains[0]), ("dk_gain", dk_gain, dgains[1])):
        check(name, found, together, together.double())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_heads": 6}, "6"),
        ({"q_gain_E": torch.ones(6)}, r"\(6,\)"),
        ({"qkv_RW": torch.ones(9, 56)}, r"\(9, 56\)"),
        ({"cos_SE2": torch.ones(5, 4, dtype=torch.float64)}, "float64"),
        ({"k_gain_E": torch.ones(8, dtype=torch.float64)}, "float64"),
        ({"n_heads": 0, "n_kv_heads": 0}, "0"),
    ],
)
def test_refusals(change: dict[str, object], named: str) -> None:
    cos, sin = angles(5, 8, "cpu")
    good = {"qkv_RW": torch.ones(10, 56), "q_gain_E": torch.ones(8), "k_gain_E": torch.ones(8), "eps": EPS}
    good |= {"cos_SE2": cos, "sin_SE2": sin, "n_heads": 3, "n_kv_heads": 2}
    with pytest.raises(ValueError, match=named):
        norm_rotate(**good | change)
