"""Products with what goes with them in one launch: against fp64, and where the kernel does not serve."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.products import (
    TALL,
    WIDE,
    Tile,
    add_product_,
    launch_product,
    product_,
    product_backward,
    swiglu_product_,
    weight_backward_,
)
from cs336_systems.kernels.swiglu import forward_op
from tests.attention.offline import ON_HOPPER, report
from tests.kernels.against_fp64 import ON_GPU, check, random

ODD = (128 * 60 + 8, 200, 1288)
"""Rows, sum and columns that no tile divides, and tiles enough."""
GPU = pytest.param("cuda", torch.bfloat16, ODD, marks=ON_GPU)


def make(shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, K), weight (N, K), dy (R, N)."""
    rows, depth, columns = shape
    sizes = (rows, depth), (columns, depth), (rows, columns)
    x, weight, dy = (random(size, device, dtype, seed) for seed, size in enumerate(sizes))
    return x, weight, dy


@pytest.mark.parametrize(("device", "dtype", "shape"), [("cpu", torch.float32, (40, 24, 48)), GPU])
def test_products(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, weight, dy = make(shape, device, dtype)
    wide_x, wide_weight, wide_dy = (t.double() for t in (x, weight, dy))
    out, gradient = torch.full_like(dy, torch.nan), torch.full_like(weight, torch.nan)
    product_(out, x, weight)
    check("product_", out, x @ weight.T, wide_x @ wide_weight.T)
    check("product_backward", product_backward(dy, weight), dy @ weight, wide_dy @ wide_weight)
    add_product_(out, dy, x, weight)
    check("add_product_", out, torch.addmm(dy, x, weight.T), wide_dy + wide_x @ wide_weight.T)
    again = dy.clone()
    add_product_(again, again, x, weight)
    assert torch.equal(again, out)
    weight_backward_(gradient, dy, x, False)
    eager, exact = dy.T @ x, wide_dy.T @ wide_x
    check("weight_backward_", gradient, eager, exact)
    weight_backward_(gradient, dy, x, True)
    check("accumulated", gradient, 2 * eager, 2 * exact)


@pytest.mark.parametrize("d_ff", [640, 648])
@pytest.mark.parametrize(("device", "dtype", "shape"), [GPU])
def test_swiglu_product(d_ff: int, device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """The bits of the separate operations, whether a tile of gates ends where those of ups begin or not."""
    x, weight, _ = make((*shape[:2], 2 * d_ff), device, dtype)
    gate_up, alone = (torch.empty(shape[0], 2 * d_ff, device=device, dtype=dtype) for _ in "12")
    z = swiglu_product_(gate_up, x, weight)
    product_(alone, x, weight)
    assert torch.equal(gate_up, alone)
    assert torch.equal(z, forward_op(gate_up))
    check("gate_up", gate_up, x @ weight.T, x.double() @ weight.double().T)


@pytest.mark.parametrize("tile", [WIDE, TALL], ids=["wide", "tall"])
@pytest.mark.parametrize("down", [(False, False), (False, True), (True, True)], ids=["forward", "back", "gradient"])
@pytest.mark.parametrize(("device", "dtype"), [pytest.param("cuda", torch.float16, marks=ON_GPU)])
def test_every_tile(tile: Tile, down: tuple[bool, bool], device: str, dtype: torch.dtype) -> None:
    rows, depth, columns = 128 * 70 + 8, 200, 1288
    left, right = (random(size, device, dtype, seed) for seed, size in enumerate(((rows, depth), (depth, columns))))
    out = torch.full((rows, columns), torch.nan, device=device, dtype=dtype)
    given = left.T.contiguous() if down[0] else left, right if down[1] else right.T.contiguous()
    assert launch_product(*given, out, down=down, tile=tile)
    check("out", out, left @ right, left.double() @ right.double())


@pytest.mark.parametrize(("device", "dtype", "shape"), [GPU])
def test_what_it_does_not_serve(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, weight, dy = make(shape, device, dtype)
    assert launch_product(x, weight, dy)
    assert not launch_product(x.float(), weight.float(), dy.float())
    assert not launch_product(x[:, 1:-7], weight[:, 1:-7], dy)  # begins off a 16-byte boundary
    assert not launch_product(x[:128], weight, dy[:128])  # few tiles
    assert not launch_product(x[:, :8], weight[:, :8], dy)  # a short sum


COMPILE = (
    ON_HOPPER
    + """
import json, sys
from cs336_systems.kernels import products

products.n_multiprocessors = lambda device: 132
tile, down = getattr(products, sys.argv[1]), json.loads(sys.argv[2])
swiglu, add = tile is products.GATED, sys.argv[3] == "add"
left, right, out = (32768, 896), (9728, 896), (32768, 9728)
shapes = (left[::-1] if down[0] else left, right[::-1] if down[1] else right, out, out)
strides = tuple((shape[1], 1) for shape in shapes)
products._prepared(shapes, strides, torch.bfloat16, torch.device("cpu"), tuple(down), swiglu, add, tile)
kernel = compiled["product_kernel"]
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": {"shared": kernel.metadata.shared}}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "down", "add"),
    [
        ("WIDE", "[false, false]", "add"),
        ("TALL", "[false, false]", "add"),
        ("WIDE", "[false, true]", ""),
        ("TALL", "[true, true]", ""),
        ("GATED", "[false, false]", ""),
    ],
)
def test_it_compiles_for_hopper(tile: str, down: str, add: str) -> None:
    found = report(COMPILE, tile, down, add)
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert not found["serialised"]
    assert found["shared"] <= 227 * 1024
    assert found["wgmma"] == 2 * 8 * (2 if tile == "TALL" else 1)  # first step and the others, of each consumer
