"""Sums over rows against fp64: chunks and blocks that end early, nothing to add, and what must be refused."""

import pytest
import torch

from cs336_systems.kernels.column_sums import CHUNK_ROWS, column_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2 * CHUNK_ROWS + 37, 130), (0, 5), (5, 0)])
def test_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    sums, exact = column_sums(x), x.double().sum(0)
    assert (sums.shape, sums.dtype) == ((shape[1],), dtype)
    bound = 24 * torch.finfo(torch.float32).eps * x.double().abs().sum(0) + torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((sums.double() - exact).abs() <= bound).all()
    assert torch.equal(column_sums(x), sums)


def test_a_nan_is_its_columns_alone_and_a_slice_is_summed_as_it_is() -> None:
    x = torch.ones(70, 6, device=DEVICE)
    x[60, 2] = float("nan")
    assert column_sums(x).isnan().tolist() == [False, False, True, False, False, False]
    assert column_sums(x[:, ::5]).tolist() == [70, 70]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="takes a matrix, got one of 3 dimensions"):
        column_sums(torch.zeros(2, 3, 4, device=DEVICE))
