"""SwiGLU against fp64, its backward in place, gates of any size, strides, and what must be refused."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.swiglu import swiglu, swiglu_backward_, swiglu_forward
from cs336_systems.model import ops
from tests.kernels.against_fp64 import INTERPRETED, ON_GPU, PLACES, check, check_refused, random

SHAPES = [(1, 2), (2, 3, 74), (33, 512), (9, 600), (40, 2002), (70, 2), (2,), (0, 8), (4, 0)]


def reference(gate_up: Tensor) -> Tensor:
    return ops.swiglu(*gate_up.chunk(2, dim=-1))


def make(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up and the gradient of the output."""
    gate_up = 3 * random(shape, device, dtype)
    return gate_up, random((*shape[:-1], shape[-1] // 2), device, dtype, seed=1)


def backward(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate_up, z), which the kernel writes over copies of its arguments."""
    z, dgate_up = (x.clone(memory_format=torch.contiguous_format) for x in (dz, gate_up))
    swiglu_backward_(z, dgate_up, with_product=True)
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
        dz_written, gate_up_written = dz.clone(), gate_up.clone()
        swiglu_backward_(dz_written, gate_up_written, with_product=with_product)
        assert torch.equal(gate_up_written, dgate_up)
        assert torch.equal(dz_written, left)


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


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_strides_and_expanded_gradients(device: str, dtype: torch.dtype) -> None:
    gate_up, dz = make((6, 40), device, dtype)
    z, (dgate_up, _) = swiglu(gate_up), backward(dz, gate_up)
    wide = torch.cat((dz, gate_up, dz), dim=1)
    for strided in (gate_up.t().contiguous().t(), wide[:, 20:60]):
        leaf = strided.detach().requires_grad_()
        out = swiglu(leaf)
        out.backward(dz.t().contiguous().t())
        assert torch.equal(out, z)
        assert torch.equal(leaf.grad, dgate_up)
    leaf = gate_up.clone().requires_grad_()
    swiglu(leaf).sum().backward()
    assert torch.equal(leaf.grad, backward(torch.ones_like(dz), gate_up)[0])


@INTERPRETED
def test_its_input_alone_is_saved() -> None:
    gate_up = torch.randn(3, 8, requires_grad=True)
    z = swiglu(gate_up)  # which holds the graph
    (saved,) = z.grad_fn.saved_tensors
    assert saved is gate_up


def test_refusals() -> None:
    gate_up, dz = torch.zeros(3, 8), torch.zeros(3, 4)
    check_refused(
        (lambda: swiglu(torch.zeros(3, 7)), r"\(3, 7\)"),
        (lambda: swiglu_backward_(gate_up, gate_up, with_product=True), r"dz \(3, 8\) .* gate_up \(3, 8\)"),
        (lambda: swiglu_backward_(dz.half(), gate_up, with_product=True), r"torch.float16 .* torch.float32"),
        (lambda: swiglu(gate_up.double()), r"torch.float64"),
        (lambda: swiglu_backward_(dz, torch.zeros(8, 3).t(), with_product=True), r"gate_up .* strides \(1, 3\)"),
    )


@pytest.mark.parametrize(("device", "dtype"), [pytest.param("cuda", torch.bfloat16, marks=ON_GPU)])
def test_more_than_2_to_the_31_elements(device: str, dtype: torch.dtype) -> None:
    n_rows, d_ff = 2**16 + 3, 2**14
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    gate_up = torch.zeros(n_rows, 2 * d_ff, device=device, dtype=dtype)
    dz = torch.zeros(n_rows, d_ff, device=device, dtype=dtype)
    last_gate_up, last_dz = make((5, 2 * d_ff), device, dtype)
    gate_up[-5:], dz[-5:] = last_gate_up, last_dz
    assert torch.equal(swiglu(gate_up)[-5:], swiglu(last_gate_up))
    swiglu_backward_(dz, gate_up, with_product=True)
    expected = backward(last_dz, last_gate_up)
    assert torch.equal(gate_up[-5:], expected[0])
    assert torch.equal(dz[-5:], expected[1])
