"""Where kernels are tested, and what they are held to: fp64, with the error of eager code in the dtype as budget."""

import pytest
import torch
from torch import Tensor

ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
PLACES = [
    pytest.param("cpu", torch.float32, marks=INTERPRETED, id="interpreted"),
    *(pytest.param("cuda", dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]
"""(device, dtype): the interpreter is right in fp32 alone."""


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
