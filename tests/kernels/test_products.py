"""Products and SwiGLU with them in one launch: against fp64, and where the kernel does not serve."""

from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

from cs336_systems.kernels import products
from cs336_systems.kernels.products import launch_product, product_, product_op, swiglu_product_, swiglu_product_op
from cs336_systems.kernels.swiglu import forward_op
from tests.kernels.against_fp64 import ON_GPU, check, random

ODD = (128 * 60 + 8, 200, 1280)
"""Rows and a sum that no tile divides, and tiles enough."""
SMALL = ("cpu", torch.float32, (40, 24, 160))
PLACES = [SMALL, *(pytest.param("cuda", dtype, ODD, marks=ON_GPU) for dtype in (torch.bfloat16, torch.float16))]


def make(shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, K), weight (N, K) and memory for their product (R, N)."""
    rows, depth, columns = shape
    x, weight = (random(size, device, dtype, seed) for seed, size in enumerate(((rows, depth), (columns, depth))))
    return x, weight, torch.full((rows, columns), torch.nan, device=device, dtype=dtype)


@pytest.mark.parametrize("narrower", [0, 16])
@pytest.mark.parametrize(("device", "dtype", "shape"), PLACES)
def test_product(narrower: int, device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """In whole tiles, and where a half of the last one lies beyond the columns, and some of the other."""
    x, weight, out = make((*shape[:2], shape[2] - 9 * narrower), device, dtype)
    product_op(out, x, weight)
    check("product_", out, x @ weight.T, x.double() @ weight.double().T)


@pytest.mark.parametrize("narrower", [0, 16])
@pytest.mark.parametrize(("device", "dtype", "shape"), PLACES[1:])
def test_swiglu_product(narrower: int, device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """The bits of the separate operations, whether tiles of gates end where those of ups begin or not."""
    x, weight, gate_up = make((*shape[:2], shape[2] - narrower), device, dtype)
    product = swiglu_product_op(gate_up, x, weight)
    alone = torch.full_like(gate_up, torch.nan)
    product_op(alone, x, weight)
    assert torch.equal(gate_up, alone)
    assert torch.equal(product, forward_op(gate_up))


@pytest.mark.parametrize(("device", "dtype", "shape"), PLACES[1:])
def test_what_it_serves(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, weight, out = make(shape, device, dtype)
    assert launch_product(x, weight, out)
    assert not launch_product(x.float(), weight.float(), out.float())
    assert not launch_product(x[:, 1:-7], weight[:, 1:-7], out)  # begins off a 16-byte boundary
    assert launch_product(x, weight[:-8], out[:, :-8])  # no whole tiles
    assert not launch_product(x, weight[:-8], out[:, :-8], torch.empty_like(out)[:, : out.shape[1] // 2 - 4])
    assert not launch_product(x[:128], weight, out[:128])  # few tiles
    assert not launch_product(x[:, :8], weight[:, :8], out)  # a short sum


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
    wrong = [(x, weight.float(), out, *others), (x, weight, out.half(), *others), (x, weight[:, :56], out, *others)]
    wrong += [(x, weight, out[:128], *others), (x, weight[:256], out, *others)]
    wrong += [(x, weight, out, each) for each in (others[0].float(), out)] if swiglu else []
    assert not any(launch_product(*tensors) for tensors in wrong)
    assert len(launched) == 1


def test_the_kernel_is_asked_for_shapes_for_which_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(products, "FASTER", {(96, 24, True), (160, 24, False)})
    monkeypatch.setattr(products, "launch_product", lambda x, weight, *outs: asked.append((len(weight), len(outs))))
    for columns in (96, 160):
        x, weight, out = make((40, 24, columns), *SMALL[:2])
        product_(out, x, weight)
        assert torch.equal(out, x @ weight.T)
        assert torch.equal(swiglu_product_(out, x, weight), forward_op(out))
    assert asked == [(96, 2), (160, 1)]
