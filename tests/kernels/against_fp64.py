"""The devices and dtypes in which kernels are tested, and their bound: fp64, with eager code's error as the budget."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
PLACES = [
    pytest.param("cpu", torch.float32, marks=INTERPRETED, id="interpreted"),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]
"""(device, dtype): the interpreter multiplies matrices rightly in fp32 alone."""
WITH_BF16 = [*PLACES, pytest.param("cpu", torch.bfloat16, marks=INTERPRETED, id="interpreted-bf16")]
"""``PLACES``, and bf16 in the interpreter for kernels that only round and compare."""


def random(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; infinities must be equal, NaN fails."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    assert not actual.isnan().any()
    infinite = exact.isinf()
    assert torch.equal(actual.isinf(), infinite)
    difference = (actual.double() - exact).masked_fill(infinite, 0.0)
    return difference.abs().max().item() if difference.numel() else 0.0


def check(name: str, actual: Tensor, eager: Tensor, exact: Tensor, floor: float | Tensor | None = None) -> None:
    """``actual`` has at most twice the error of eager code in the same dtype, plus a floor where that is 0 by luck.

    By default the floor is one rounding of the largest value to the dtype, and 8 in fp32: fast exponentials and
    divisions on a GPU are good to two each. Where terms of a sum cancel, the caller gives it.
    """
    assert actual.dtype == eager.dtype, name
    if floor is None:
        rounding = torch.finfo(actual.dtype).eps + 8 * torch.finfo(torch.float32).eps
        floor = rounding * exact.abs().max().item() if exact.numel() else 0.0
    ours, others = error(actual, exact), error(eager, exact)
    allowed = 2 * others + float(floor)
    print(f"{name} {tuple(actual.shape)} {actual.dtype}: {ours:.2e}, eager {others:.2e}, allowed {allowed:.2e}")
    assert ours <= allowed, name


def check_refused(*cases: tuple[Callable[[], object], str]) -> None:
    """Each call raises ValueError whose message matches."""
    for call, said in cases:
        with pytest.raises(ValueError, match=said):
            call()
