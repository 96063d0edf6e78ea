"""The passes before and after the backward: statistics are sums of parts, and gradients are rotated as blocks do it."""

import pytest
import torch

from cs336_systems.attention.hopper.passes import (
    LSE_OF_NOTHING,
    PADDED_ROWS,
    hopper_postprocess_kernel,
    hopper_preprocess_kernel,
)
from cs336_systems.attention.hopper.primitives import PARTS, STATISTICS, part_weight
from cs336_systems.kernels.rotary import rotate_
from tests.attention.slices import heads_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, N_QUERIES, D, SCALE = 2, 2, 150, 24, 0.3125


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_sums_of_weighted_parts(dtype: torch.dtype, size: float) -> None:
    """As exact as fp32, which bf16 and fp16 alone are not: they keep 8 and 11 bits."""
    torch.manual_seed(0)
    padded = 2 * PADDED_ROWS
    o, do = (torch.randn(BATCH, HEADS, N_QUERIES, D, device=DEVICE) * min(size, 1e3) ** 0.5 for _ in range(2))
    o, do = o.to(dtype), do.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    lse = size * torch.randn(BATCH, HEADS, N_QUERIES, device=DEVICE)
    lse[1, 1, 3] = float("-inf")
    stats = torch.full((BATCH, HEADS, padded, STATISTICS.value), float("nan"), dtype=dtype, device=DEVICE)
    sums = torch.full((BATCH, HEADS, padded, 32), float("nan"), device=DEVICE)
    strides = (*o.stride()[:3], *do.stride()[:3])
    blocks = {"D": D, "BLOCK_D": 32, "ROWS": 64}
    grid = (padded // 64 * HEADS * BATCH,)
    hopper_preprocess_kernel[grid](o, do, lse, stats, sums, *strides, HEADS, N_QUERIES, padded, SCALE, **blocks)
    weights = torch.tensor([part_weight(part) for part in range(PARTS.value)], dtype=torch.float64, device=DEVICE)
    subtracted, delta = (stats[..., first : first + PARTS.value].double() @ weights for first in (0, PARTS.value))
    assert (subtracted[..., N_QUERIES:] == LSE_OF_NOTHING.value).all()
    assert subtracted[1, 1, 3] == LSE_OF_NOTHING.value
    assert 0 < LSE_OF_NOTHING.value < float("inf")
    assert (delta[..., N_QUERIES:] == 0).all()
    sees = lse.isfinite()
    exact = lse[sees].double() / SCALE
    assert ((subtracted[..., :N_QUERIES][sees] - exact).abs() <= 2.0**-22 * exact.abs() + 2.0**-32).all()
    terms = o.double() * do.double()
    error = (delta[..., :N_QUERIES] - terms.sum(-1)).abs()
    assert (error <= 2.0**-23 * D * terms.abs().sum(-1) + 2.0**-32).all()
    assert (stats[..., 2 * PARTS.value :] == 0).all()
    assert (sums == 0).all()


def as_added(sums: torch.Tensor) -> torch.Tensor:
    """Sums (B, H, padded, BLOCK_D) as consumers leave them: 64 rows at a time, and half of the columns."""
    batch, heads, padded, block_d = sums.shape
    dims = batch, heads, padded // 64, 4, 2, 8, 2, block_d // 16, 4, 2  # warp, half, group; part, columns, thread, one
    return sums.view(dims).permute(0, 1, 2, 6, 7, 3, 5, 8, 4, 9).contiguous()


@pytest.mark.parametrize(("rotated", "noted"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("d_head", "block_d"), [(64, 64), (128, 128), (24, 64), (80, 128)])
def test_gradients_are_rounded_and_rotated_as_by_two_kernels(
    d_head: int, block_d: int, rotated: bool, noted: bool
) -> None:
    torch.manual_seed(0)
    batch, heads, kv_heads, n, scale = 2, 3, 1, 150, 0.3125
    sums = torch.zeros(batch, heads, 256, block_d, device=DEVICE)
    sums[:, :, :n, :d_head] = torch.randn(batch, heads, n, d_head, device=DEVICE)
    dqkv = torch.randn(batch, n, (heads + 2 * kv_heads) * d_head, device=DEVICE).bfloat16()
    angles = torch.rand(2, n, d_head // 2, device=DEVICE)
    expected, found = dqkv.clone(), torch.zeros(3, device=DEVICE)
    heads_of(expected, heads, kv_heads)[0].copy_(sums[:, :, :n, :d_head] * scale)
    if rotated:
        rotate_(expected, *angles, heads, kv_heads, inverse=True, absmax=found[0] if noted else None)
    gradients = heads_of(dqkv, heads, kv_heads)
    n_heads = heads + (rotated + noted) * kv_heads
    hopper_postprocess_kernel[(3 * batch * n_heads,)](
        as_added(sums), gradients[0],
        *((*gradients[1:], *angles) if rotated else (None,) * 4),
        found[1] if noted else None,
        *(step for x in gradients for step in x.stride()[:3]),
        heads, kv_heads, n_heads, n, 256, scale,
        D=d_head, BLOCK_D=block_d, ROWS=64, enable_fp_fusion=False,
    )  # fmt: skip
    assert torch.equal(dqkv, expected)
    assert found[1] == found[0]
    assert (found[0] > 0) == noted
