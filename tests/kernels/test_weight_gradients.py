"""A weight's gradient added in one launch: against fp64, beside torch's, and where the kernel does not serve."""

from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

from cs336_systems.kernels import weight_gradients
from cs336_systems.kernels.weight_gradients import add_weight_gradient_, launch_weight_gradient
from tests.attention.offline import ON_HOPPER, report
from tests.kernels.against_fp64 import ON_GPU, check, random

ODD = (64 * 17 + 8, 128 * 30 + 8, 256 * 10 - 72)
"""Rows, and both sides of a weight, that no tile divides, and tiles enough."""
SMALL = ("cpu", torch.float32, (40, 24, 160))
ON_GPUS = [pytest.param("cuda", dtype, ODD, marks=ON_GPU) for dtype in (torch.bfloat16, torch.float16)]


def make(shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient (N, K) that holds something, dy (R, N) and x (R, K)."""
    rows, n, k = shape
    sizes = ((n, k), (rows, n), (rows, k))
    gradient, dy, x = (random(size, device, dtype, seed) for seed, size in enumerate(sizes))
    return gradient, dy, x


@pytest.mark.parametrize(("device", "dtype", "shape"), [SMALL, *ON_GPUS])
def test_it_adds(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    gradient, dy, x = make(shape, device, dtype)
    exact = gradient.double() + dy.double().T @ x.double()
    torchs = gradient.addmm(dy.T, x)
    add_weight_gradient_(gradient, dy, x)
    check("add_weight_gradient_", gradient, torchs, exact)


@pytest.mark.parametrize(("device", "dtype", "shape"), ON_GPUS)
def test_again_and_again_it_adds_the_same(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """What buffers and barriers hold of a launch or of a tile before must not show."""
    gradient, dy, x = make(shape, device, dtype)
    first = gradient.clone()
    add_weight_gradient_(first, dy, x)
    for _ in range(50):
        again = gradient.clone()
        add_weight_gradient_(again, dy, x)
        assert torch.equal(again, first)


@pytest.mark.parametrize(("device", "dtype", "shape"), ON_GPUS)
def test_what_it_serves(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    gradient, dy, x = make(shape, device, dtype)
    assert launch_weight_gradient(gradient, dy, x)
    assert launch_weight_gradient(gradient[:, 8:], dy, x[:, 8:])
    assert not launch_weight_gradient(gradient.float(), dy.float(), x.float())
    assert not launch_weight_gradient(gradient[:, 1:-7], dy, x[:, 1:-7])  # begins off a 16-byte boundary
    assert not launch_weight_gradient(gradient[:128], dy[:, :128], x)  # few tiles
    assert not launch_weight_gradient(gradient, dy[:1016], x[:1016])  # a short sum


def test_what_does_not_fit_is_left_to_torch_which_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is described by the shapes and dtypes that are given: it would be read and written past its end."""
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(weight_gradients, "is_hopper", lambda device: True)
    monkeypatch.setattr(weight_gradients, "n_multiprocessors", lambda device: 1)
    monkeypatch.setattr(weight_gradients, "Prepared", lambda *arguments, **options: lambda _, *at: launched.append(at))
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 0))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    gradient, dy, x = make((1024, 256, 512), "cpu", torch.bfloat16)
    assert launch_weight_gradient(gradient, dy, x)
    assert len(launched) == 1
    for wrong in (
        (gradient.float(), dy, x),
        (gradient, dy, x.half()),
        (gradient[:128], dy, x),
        (gradient, dy, x[:, :256]),
        (gradient, torch.cat([dy, dy]), x),
    ):
        with pytest.raises(RuntimeError):
            add_weight_gradient_(*wrong)
    assert len(launched) == 1


COMPILE = (
    ON_HOPPER
    + """
import json
from cs336_systems.kernels import weight_gradients

weight_gradients.n_multiprocessors = lambda device: 132
shapes = ((8192, 28672), (8192, 4096), (28672, 4096))
strides = tuple((shape[1], 1) for shape in shapes)
weight_gradients._prepared(shapes, strides, 3 * (torch.bfloat16,), torch.device("cpu"))
kernel = compiled["weight_gradient_kernel"]
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": {"shared": kernel.metadata.shared}}))
"""
)


@pytest.mark.slow
def test_it_compiles_for_hopper() -> None:
    found = report(COMPILE, "")
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert not found["serialised"]
    assert found["shared"] <= 227 * 1024
    assert found["wgmma"] == 2 * (4 + 4)  # of both consumers, first step and others
