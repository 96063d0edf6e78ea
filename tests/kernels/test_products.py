"""Products and SwiGLU with them in one launch: against fp64, and where the kernel does not serve."""

from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

from cs336_systems.kernels import products
from cs336_systems.kernels.lora_reference import LowRank, expand_
from cs336_systems.kernels.matmul import product_, swiglu_product_
from cs336_systems.kernels.products import launch_product
from cs336_systems.kernels.swiglu import swiglu_forward
from tests.kernels.against_fp64 import check, random

ODD = (128 * 60 + 8, 200, 1280)
"""Rows and a sum that no tile divides, and tiles enough."""
PLACES = [pytest.param("cuda", dtype, ODD, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)]


def make(shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, K), weight (N, K) and memory for their product (R, N)."""
    rows, depth, columns = shape
    x, weight = (random(size, device, dtype, seed) for seed, size in enumerate(((rows, depth), (columns, depth))))
    return x, weight, torch.full((rows, columns), torch.nan, device=device, dtype=dtype)


@pytest.mark.parametrize(("device", "dtype", "shape"), PLACES)
def test_products(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """In whole tiles, and where a half of the last one lies beyond the columns, and some of the other.

    With SwiGLU, the bits of the separate operations.
    """
    for narrower in (0, 144):
        x, weight, out = make((*shape[:2], shape[2] - narrower), device, dtype)
        assert launch_product(x, weight, out)
        check("product_", out, x @ weight.T, x.double() @ weight.double().T)
    x, weight, gate_up = make(shape, device, dtype)
    product, alone = gate_up.new_empty(shape[0], shape[2] // 2), torch.full_like(gate_up, torch.nan)
    assert launch_product(x, weight, gate_up, product) and launch_product(x, weight, alone)
    assert torch.equal(gate_up, alone)
    assert torch.equal(product, swiglu_forward(gate_up))


@pytest.mark.parametrize(("device", "dtype", "shape"), PLACES)
@pytest.mark.parametrize("rank", [16, 40])
def test_an_adapter_is_added_by_halves_before_anything_is_rounded(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], rank: int
) -> None:
    """The second rank takes two steps, the second of which gates find empty. One that is zero changes no bit."""
    x, weight, gate_up = make(shape, device, dtype)
    half = shape[2] // 2
    h, b = (random(size, device, dtype, seed) for seed, size in enumerate(((shape[0], 2 * rank), (shape[2], rank)), 2))
    product, low = gate_up.new_empty(shape[0], half), LowRank(h, b, (half, half))
    assert launch_product(x, weight, gate_up, product, low)
    eager, exact = x @ weight.T, x.double() @ weight.double().T
    expand_(eager, low)
    expand_(exact, LowRank(h.double(), b.double(), low.widths))
    check("gate_up", gate_up, eager, exact)
    assert torch.equal(product, swiglu_forward(gate_up))
    plain, zero = torch.full_like(gate_up, torch.nan), torch.full_like(gate_up, torch.nan)
    assert launch_product(x, weight, plain, product)
    assert launch_product(x, weight, zero, product, low._replace(factor=torch.zeros_like(b)))
    assert torch.equal(zero, plain)


@pytest.mark.parametrize("swiglu", [False, True])
def test_what_does_not_fit_is_left_to_torch_which_says_so(monkeypatch: pytest.MonkeyPatch, swiglu: bool) -> None:
    """Memory is described by the shapes and dtypes that are given: it would be read and written past its end."""
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(products, "is_hopper", lambda device: True)
    monkeypatch.setattr(products, "n_multiprocessors", lambda device: 1)
    monkeypatch.setattr(products, "Prepared", lambda *arguments, **options: lambda _, *at: launched.append(at))
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 0))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    x, weight, out = make((256, 64, 512), "cpu", torch.bfloat16)
    others = [torch.empty(256, 256, dtype=torch.bfloat16)] if swiglu else []
    assert launch_product(x, weight, out, *others)
    low = LowRank(*(torch.empty(shape, dtype=torch.bfloat16) for shape in ((256, 16), (512, 8))), (256, 256))
    product = others[0] if swiglu else None
    assert launch_product(x, weight, out, product, low) == swiglu
    assert not launch_product(x, weight, out, product, low._replace(h=low.h[:, :8]))
    wrong = [(x, weight.float(), out, *others), (x, weight, out.half(), *others), (x, weight[:, :56], out, *others)]
    wrong += [(x, weight, out[:128], *others), (x, weight[:256], out, *others)]
    wrong += [(x, weight, out, each) for each in (others[0].float(), out)] if swiglu else []
    assert not any(launch_product(*tensors) for tensors in wrong)
    assert len(launched) == 1 + swiglu


def test_the_kernel_is_asked_for_shapes_for_which_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(products, "FASTER", {(96, 24, True), (160, 24, False)})
    monkeypatch.setattr(products, "launch_product", lambda x, weight, *outs: asked.append((len(weight), *outs[1:])))
    for columns in (96, 160):
        x, weight, out = make((40, 24, columns), "cpu", torch.float32)
        product_(out, x, weight)
        assert torch.equal(out, x @ weight.T)
        product, half = torch.empty(len(x), columns // 2), columns // 2
        low = LowRank(torch.ones(len(x), 2 * 4), torch.ones(columns, 4), (half, half))
        for added in (None, low):
            swiglu_product_(out, x, weight, product, added)
            torch.testing.assert_close(out, x @ weight.T + (0 if added is None else 4))
            assert torch.equal(product, swiglu_forward(out))
    assert [(n, len(others)) for n, *others in asked] == [(96, 2), (96, 2), (160, 0), (160, 0), (160, 0)]
