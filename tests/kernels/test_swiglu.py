"""SwiGLU against fp64, backward with its product and in place, its operators, refusals, and the compiled code."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.swiglu import (
    backward_in_place_op,
    backward_op,
    forward_op,
    swiglu,
    swiglu_backward,
    swiglu_backward_,
    swiglu_forward,
)
from cs336_systems.model import ops
from tests.attention.offline import ON_HOPPER, report
from tests.kernels.against_fp64 import INTERPRETED, ON_GPU, PLACES, check, random

SHAPES = [(1, 2), (7, 6), (2, 3, 74), (33, 512), (9, 600), (40, 2002), (70, 2), (2,), (0, 8), (4, 0)]


def reference(gate_up: Tensor) -> Tensor:
    return ops.swiglu(*gate_up.chunk(2, dim=-1))


def make(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up and the gradient of the output."""
    gate_up = 3 * random(shape, device, dtype)
    return gate_up, random((*shape[:-1], shape[-1] // 2), device, dtype, seed=1)


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
    assert torch.equal(swiglu_backward(dz, gate_up, with_product=False)[0], dgate_up)
    assert swiglu_backward(dz, gate_up, with_product=False)[1] is None
    for found, expected in zip(swiglu_backward(dz, gate_up, with_product=True), (dgate_up, z), strict=True):
        assert torch.equal(found, expected)
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
    dgate_up, z_again = swiglu_backward(torch.ones(10, device=device, dtype=dtype), gate_up, with_product=True)
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": torch.finfo(torch.float16).tiny}
    torch.testing.assert_close(z_again.double(), z.detach(), **close)
    torch.testing.assert_close(dgate_up.double(), exact.grad, **close)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_strides_and_expanded_gradients(device: str, dtype: torch.dtype) -> None:
    gate_up, dz = make((6, 40), device, dtype)
    z, (dgate_up, _) = swiglu(gate_up), swiglu_backward(dz, gate_up, with_product=False)
    wide = torch.cat((dz, gate_up, dz), dim=1)
    for strided in (gate_up.t().contiguous().t(), wide[:, 20:60]):
        leaf = strided.detach().requires_grad_()
        out = swiglu(leaf)
        out.backward(dz.t().contiguous().t())
        assert torch.equal(out, z)
        assert torch.equal(leaf.grad, dgate_up)
    leaf = gate_up.clone().requires_grad_()
    swiglu(leaf).sum().backward()
    assert torch.equal(leaf.grad, swiglu_backward(torch.ones_like(dz), gate_up, with_product=False)[0])


@INTERPRETED
def test_its_input_alone_is_saved() -> None:
    gate_up = torch.randn(3, 8, requires_grad=True)
    z = swiglu(gate_up)
    (saved,) = z.grad_fn.saved_tensors
    assert saved is gate_up


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_operators_pass_opcheck(device: str, dtype: torch.dtype) -> None:
    gate_up, dz = make((3, 4, 10), device, dtype)
    torch.library.opcheck(forward_op, (gate_up,))
    for with_product in (False, True):
        torch.library.opcheck(backward_op, (dz, gate_up, with_product))
        torch.library.opcheck(backward_in_place_op, (dz, gate_up, with_product))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_compiles_without_graph_breaks(device: str, dtype: torch.dtype) -> None:
    gate_up, dz = make((5, 12), device, dtype)
    leaf = gate_up.requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: 2 * swiglu(x), fullgraph=True, backend="aot_eager")
    z, expected = compiled(leaf), 2 * swiglu(leaf)
    assert torch.equal(z, expected)
    assert torch.equal(*(torch.autograd.grad(x, leaf, dz)[0] for x in (z, expected)))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, dz = torch.zeros(3, 8), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"gate and up alike, got \(3, 7\)"):
        swiglu(torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"dz \(3, 8\) does not match the halves of gate_up \(3, 8\)"):
        swiglu_backward(gate_up, gate_up, with_product=True)
    with pytest.raises(ValueError, match=r"shared, got dz torch.float16 on cpu, gate_up torch.float32 on cpu"):
        swiglu_backward(dz.half(), gate_up, with_product=True)
    with pytest.raises(ValueError, match=r"takes float32, bfloat16 and float16, got torch.float64"):
        swiglu(gate_up.double())
    with pytest.raises(ValueError, match=r"gate_up is overwritten and must be contiguous, got strides \(1, 3\)"):
        swiglu_backward_(dz, torch.zeros(8, 3).t(), with_product=True)
    monkeypatch.setattr("triton.JITFunction", object)  # what a kernel is without the interpreter
    with pytest.raises(ValueError, match=r"needs a CUDA device .* got a tensor on cpu"):
        swiglu_forward(gate_up)


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
    expected = swiglu_backward(last_dz, last_gate_up, with_product=True)
    assert torch.equal(gate_up[-5:], expected[0])
    assert torch.equal(dz[-5:], expected[1])


COMPILE = (
    ON_HOPPER
    + """
import importlib, json, sys
swiglu = importlib.import_module("cs336_systems.kernels.swiglu")

name, d_ff = sys.argv[1], int(sys.argv[2])
gate_up, dz = (torch.zeros(40, width, dtype=torch.bfloat16) for width in (2 * d_ff, d_ff))
if name == "forward":
    swiglu.forward_op(gate_up)
else:
    swiglu.backward_in_place_op(dz, gate_up, True)
kernel = compiled[f"swiglu_{name}_kernel"]
counted = ("ld.global", "ld.global.v4.b32", "st.global", "st.global.v4.b32", "bar.sync")
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": {text: kernel.asm["ptx"].count(text) for text in counted}}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "loads", "stores", "registers"), [("forward", 4, 2, 32), ("backward", 6, 6, 64)])
def test_it_compiles_to_wide_accesses(kernel: str, loads: int, stores: int, registers: int) -> None:
    """16 bytes each, of two blocks of 1,024 elements; and registers for 16 or 8 programs on a multiprocessor."""
    found = report(COMPILE, kernel, 11008)
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["registers"] <= registers
    assert found["ld.global"] == found["ld.global.v4.b32"] == loads
    assert found["st.global"] == found["st.global.v4.b32"] == stores
    assert found["bar.sync"] == (kernel == "backward")
