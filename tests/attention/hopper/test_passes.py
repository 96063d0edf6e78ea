"""The statistics that preprocess writes for the backward: weighted sums of their parts are the numbers."""

import pytest
import torch

from cs336_systems.attention.hopper.passes import LSE_OF_NOTHING, PADDED_ROWS, hopper_preprocess_kernel
from cs336_systems.attention.hopper.primitives import PARTS, STATISTICS, part_weight

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
