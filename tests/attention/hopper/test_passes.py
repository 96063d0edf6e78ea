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
    """Within 2 ** -24 of each number, and where fp16 ends, within 2 ** -32."""
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
    found = [stats[..., first : first + PARTS.value].double() @ weights for first in (0, PARTS.value)]
    expected = torch.full((2, HEADS, padded), 0.0, dtype=torch.float64, device=DEVICE)
    expected[0, :, :N_QUERIES] = lse.double() / SCALE
    expected[0, :, N_QUERIES:] = expected[0, 1, 3] = UNSEEING.value
    expected[1, :, :N_QUERIES] = (o.double() * do.double()).sum(-1)[0]
    of_sum = 2.0**-24 * (o.double() * do.double()).abs().sum(-1)[0] * D  # delta is summed in fp32
    for got, wanted, error in zip(found, expected, (0.0, of_sum), strict=True):
        bound = 2.0**-24 * wanted.abs() + 2.0**-32
        bound[:, :N_QUERIES] += error + 2.0**-22 * wanted[:, :N_QUERIES].abs()  # the quotient, and scale in fp32
        assert ((got - wanted).abs() <= bound).all()
    assert (stats[..., 2 * PARTS.value :] == 0).all()
    assert (sums == 0).all()
