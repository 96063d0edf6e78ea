"""The weighted sum against fp64: awkward shapes, both gradients, and what must be refused."""

import pytest
import torch

from cs336_systems.kernels.weighted_sum import weighted_sum
from tests.kernels.against_fp64 import PLACES, check, check_refused, random

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(2, 3, 37), (17, 300), (5,), (0, 8), (4, 0)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_values_and_gradients(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    x, weight, g = (random(size, device, dtype, i) for i, size in enumerate((shape, shape[-1:], shape[:-1])))
    results = []
    for function, wide in ((weighted_sum, dtype), (torch.matmul, dtype), (torch.matmul, torch.float64)):
        leaves = [tensor.to(wide, copy=True).requires_grad_() for tensor in (x, weight)]
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, g.to(wide))))
    for name, *found in zip(("out", "grad_x", "grad_weight"), *results, strict=True):
        check(name, *found)


def test_strides_and_expanded_gradients() -> None:
    x = torch.randn(40, 6, device=DEVICE).t().requires_grad_()
    weight = torch.randn(80, device=DEVICE)[::2].requires_grad_()
    weighted_sum(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().expand(6, 40))
    torch.testing.assert_close(weight.grad, x.detach().sum(0))


def test_refusals() -> None:
    x = torch.zeros(3, 4)
    check_refused(
        (lambda: weighted_sum(x, torch.zeros(5)), r"weight \(5,\) .* x \(3, 4\)"),
        (lambda: weighted_sum(x, torch.zeros(4, dtype=torch.float64)), "float32 on cpu and torch.float64"),
    )
