"""What the main kernel of the backward finds in memory: statistics in parts whose weighted sums are the numbers."""

import pytest
import torch

from cs336_systems.attention.hopper.passes import PADDED_ROWS, UNSEEING, hopper_preprocess_kernel
from cs336_systems.attention.hopper.primitives import PARTS, STATISTICS, weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, N_QUERIES, D, SCALE = 2, 150, 24, 0.3


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_sums_of_weighted_parts(dtype: torch.dtype, size: float) -> None:
    """As exact as fp32, which bf16 and fp16 alone are not: they keep 8 and 11 bits."""
    torch.manual_seed(0)
    padded = 2 * PADDED_ROWS
    o, do = torch.randn(2, 1, HEADS, N_QUERIES, D, device=DEVICE).to(dtype)
    lse = size * torch.randn(HEADS, N_QUERIES, device=DEVICE)
    lse[1, 3] = float("-inf")
    stats = torch.full((HEADS, padded, STATISTICS.value), float("nan"), dtype=dtype, device=DEVICE)
    sums = torch.full((HEADS, padded, 32), float("nan"), device=DEVICE)
    strides = (*o.stride()[:3], *do.stride()[:3])
    blocks = {"D": D, "BLOCK_D": 32, "ROWS": 64}
    grid = (padded // 64 * HEADS,)
    hopper_preprocess_kernel[grid](o, do, lse, stats, sums, *strides, HEADS, N_QUERIES, padded, SCALE, **blocks)
    weights = torch.tensor([weight(part) for part in range(PARTS.value)], dtype=torch.float64, device=DEVICE)
    subtracted, delta = (stats[..., first : first + PARTS.value].double() @ weights for first in (0, PARTS.value))
    assert (subtracted[:, N_QUERIES:] == UNSEEING.value).all()
    assert subtracted[1, 3] == UNSEEING.value
    assert (delta[:, N_QUERIES:] == 0).all()
    sees = lse.isfinite()
    exact = lse[sees].double() / SCALE
    assert ((subtracted[:, :N_QUERIES][sees] - exact).abs() <= 2.0**-22 * exact.abs() + 2.0**-32).all()
    terms = (o.double() * do.double())[0]
    error = (delta[:, :N_QUERIES] - terms.sum(-1)).abs()
    assert (error <= 2.0**-23 * D * terms.abs().sum(-1)).all()
    assert (stats[..., 2 * PARTS.value :] == 0).all()
    assert (sums == 0).all()
