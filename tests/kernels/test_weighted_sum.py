"""The weighted sum against fp64: awkward shapes, both gradients, and what must be refused."""

import pytest
import torch

from cs336_systems.kernels.weighted_sum import weighted_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, shape[-1:], shape[:-1])
    x, weight, g = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)
    return x.requires_grad_(), weight.requires_grad_(), g


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    assert not actual.isnan().any()
    return (actual.double() - exact).abs().max().item() if actual.numel() else 0.0


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 3, 37), (33, 256), (17, 300), (5,), (0, 8), (4, 0)])
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x, weight, g = make(shape, dtype)
        exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
        eager_x, eager_weight = (t.detach().requires_grad_() for t in (x, weight))
        out, exact, eager = weighted_sum(x, weight), exact_x @ exact_weight, eager_x @ eager_weight
        assert out.shape == exact.shape
        assert out.dtype == dtype
        for result, gradient in ((out, g), (exact, g.double()), (eager, g)):
            result.backward(gradient)
        for name, actual, other, truth in (
            ("out", out, eager, exact),
            ("grad_x", x.grad, eager_x.grad, exact_x.grad),
            ("grad_weight", weight.grad, eager_weight.grad, exact_weight.grad),
        ):
            largest = truth.abs().max().item() if truth.numel() else 0.0
            budget = 2 * error(other, truth) + torch.finfo(dtype).eps * largest
            print(f"{name} {shape} {dtype}: {error(actual, truth):.2e}, allowed {budget:.2e}")
            assert error(actual, truth) <= budget


def test_strides_and_expanded_gradients() -> None:
    x = torch.randn(40, 6, device=DEVICE).t().requires_grad_()
    weight = torch.randn(80, device=DEVICE)[::2].requires_grad_()
    weighted_sum(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().expand(6, 40))
    torch.testing.assert_close(weight.grad, x.detach().sum(0))


def test_refusals() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"weight \(5,\) does not match the last dimension of x \(3, 4\)"):
        weighted_sum(x, torch.zeros(5))
    with pytest.raises(ValueError, match="float32 on cpu and torch.float64"):
        weighted_sum(x, torch.zeros(4, dtype=torch.float64))
