"""SwiGLU against fp64, its backward in place, gates of any size, strides, and what must be refused."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.lora_reference import LowRank, expand_
from cs336_systems.kernels.swiglu import swiglu, swiglu_backward_, swiglu_forward
from cs336_systems.model import ops
from tests.kernels.against_fp64 import PLACES, check, check_refused, random

SHAPES = [(2, 3, 74), (9, 600), (70, 2), (2,), (0, 8), (4, 0)]


def reference(gate_up: Tensor) -> Tensor:
    return ops.swiglu(*gate_up.chunk(2, dim=-1))


def make(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up and the gradient of the output."""
    gate_up = 3 * random(shape, device, dtype)
    return gate_up, random((*shape[:-1], shape[-1] // 2), device, dtype, seed=1)


def backward(dz: Tensor, gate_up: Tensor, *, with_product: bool = True) -> tuple[Tensor, Tensor]:
    """(dgate_up, z or dz), which the kernel writes over copies of its arguments."""
    z, dgate_up = (x.clone(memory_format=torch.contiguous_format) for x in (dz, gate_up))
    swiglu_backward_(z, dgate_up, with_product=with_product)
    return dgate_up, z


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    gate_up, dz = make(shape, device, dtype)
    results = []
    for function, wide in ((swiglu, dtype), (reference, dtype), (reference, torch.float64)):
        leaf = gate_up.to(wide, copy=True).requires_grad_()
        z = function(leaf)
        results.append((z.detach(), *torch.autograd.grad(z, leaf, dz.to(wide))))
    for name, *found in zip(("z", "dgate_up"), *results, strict=True):
        check(name, *found)
    z, dgate_up = results[0]
    assert torch.equal(swiglu_forward(gate_up), z)
    for with_product, left in ((False, dz), (True, z)):
        found = backward(dz, gate_up, with_product=with_product)
        assert all(map(torch.equal, found, (dgate_up, left)))
    # other strides, and an arriving gradient that is one number expanded
    leaf = torch.stack((gate_up, gate_up), dim=-1)[..., 0].requires_grad_()
    out = swiglu(leaf)
    assert torch.equal(out, z)
    out.sum().backward()
    assert torch.equal(leaf.grad, backward(torch.ones_like(dz), gate_up)[0])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("rows", "d_ff", "rank"), [(37, 130, 5), (9, 64, 70)])
def test_what_is_added_to_dz_in_backward(rows: int, d_ff: int, rank: int, device: str, dtype: torch.dtype) -> None:
    """A matrix of low rank, whose factor has strides as A of an adapter; one that is zero changes no bit."""
    gate_up, dz = make((rows, 2 * d_ff), device, dtype)
    h, factor = (random(shape, device, dtype, seed) for seed, shape in enumerate(((rows, rank), (rank, d_ff)), 2))
    found = dz.clone(), gate_up.clone()
    swiglu_backward_(*found, with_product=True, low=LowRank(h, factor.T, (d_ff,)))
    results = []
    for wide in (dtype, torch.float64):
        leaf, added = gate_up.to(wide, copy=True).requires_grad_(), dz.to(wide, copy=True)
        expand_(added, LowRank(h.to(wide), factor.to(wide).T, (d_ff,)))
        results.append(torch.autograd.grad(reference(leaf), leaf, added)[0])
    check("dgate_up", found[1], *results)
    assert torch.equal(found[0], swiglu_forward(gate_up))
    zero = dz.clone(), gate_up.clone()
    swiglu_backward_(*zero, with_product=False, low=LowRank(torch.zeros_like(h), factor.T, (d_ff,)))
    assert torch.equal(zero[1], backward(dz, gate_up)[0])
    with pytest.raises(ValueError, match=rf"parts of \({d_ff // 2}, {d_ff // 2}\) columns do not fit"):
        swiglu_backward_(*zero, with_product=False, low=LowRank(h, factor.T, (d_ff // 2, d_ff // 2)))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gates_of_any_size(device: str, dtype: torch.dtype) -> None:
    gates = torch.tensor([-6e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 6e4], dtype=torch.float64)
    gate_up = torch.cat((gates, torch.ones(10))).to(device, dtype)
    exact = gate_up.double().requires_grad_()
    z = reference(exact)
    z.backward(torch.ones_like(z))
    dgate_up, z_again = backward(torch.ones(10, device=device, dtype=dtype), gate_up)
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": torch.finfo(torch.float16).tiny}
    torch.testing.assert_close(z_again.double(), z.detach(), **close)
    torch.testing.assert_close(dgate_up.double(), exact.grad, **close)


def test_refusals() -> None:
    gate_up, dz = torch.zeros(3, 8), torch.zeros(3, 4)
    check_refused(
        (lambda: swiglu(torch.zeros(3, 7)), r"\(3, 7\)"),
        (lambda: swiglu_backward_(gate_up, gate_up, with_product=True), r"dz \(3, 8\) .* gate_up \(3, 8\)"),
        (lambda: swiglu_backward_(dz, torch.zeros(8, 3).t(), with_product=True), r"gate_up .* strides \(1, 3\)"),
    )
