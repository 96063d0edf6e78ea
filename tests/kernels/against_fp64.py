"""The devices and dtypes in which kernels are tested, and their bound: fp64, with eager code's error as the budget."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
PLACES = [
    pytest.param("cpu", torch.float32, marks=INTERPRETED, id="interpreted"),
    *(pytest.param("cuda", dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]
"""(device, dtype): the interpreter multiplies matrices rightly in fp32 alone."""
WITH_BF16 = [*PLACES, pytest.param("cpu", torch.bfloat16, marks=INTERPRETED, id="interpreted-bf16")]
"""``PLACES``, and bf16 in the interpreter for kernels that only round and compare."""


def random(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(name: str, actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """``actual`` within twice the eager error, plus a floor for where that is nought by luck.

    The floor is of the largest value one rounding to the dtype, and 8 in fp32: fast exponentials and divisions on a GPU
    are good to two each.
    """
    assert actual.shape == eager.shape == exact.shape
    assert actual.dtype == eager.dtype
    assert actual.isfinite().all(), name
    if actual.numel():
        ours, others = ((x.double() - exact).abs().max().item() for x in (actual, eager))
        rounding = torch.finfo(actual.dtype).eps + 8 * torch.finfo(torch.float32).eps
        allowed = 2 * others + rounding * exact.abs().max().item()
        print(f"{name} {tuple(actual.shape)} {actual.dtype}: {ours:.2e}, eager {others:.2e}, allowed {allowed:.2e}")
        assert ours <= allowed, name


def check_refused(*cases: tuple[Callable[[], object], str]) -> None:
    """Each call raises ValueError whose message matches."""
    for call, said in cases:
        with pytest.raises(ValueError, match=said):
            call()
