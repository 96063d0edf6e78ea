"""SwiGLU's backward into fp8: to the bit what it is in two launches that store it, and quantization of that."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.swiglu import swiglu_backward, swiglu_forward
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize, swiglu_backward_quantize_op
from tests.attention.offline import ON_HOPPER, report
from tests.kernels.against_fp64 import INTERPRETED, PLACES, random
from tests.kernels.test_quantize import check_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
QUANTIZED_PLACES = [*PLACES, pytest.param("cpu", BF16, marks=INTERPRETED, id="interpreted-bf16")]


def operands(n_rows: int, d_ff: int, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """dz and gate | up."""
    return random((n_rows, d_ff), device, dtype, seed), random((n_rows, 2 * d_ff), device, dtype, seed + 1)


def check_both_ways(dz: Tensor, gate_up: Tensor, fp8: torch.dtype, z_fp8: torch.dtype = E4M3) -> None:
    """With and without the second orientation and z, twice."""
    dgate_up, z = swiglu_backward(dz, gate_up, with_product=True)
    assert torch.equal(z.nan_to_num(-1.0), swiglu_forward(gate_up).nan_to_num(-1.0))
    largest, z_absmax = reference.absmax(dgate_up), reference.absmax(z)
    for transposed, with_z in ((True, True), (True, False), (False, True)):
        expected = reference.quantize(dgate_up, largest, fp8, transposed=transposed)
        for _ in range(2):
            slot = torch.zeros((), device=dz.device)
            how = {"transposed": transposed, "z_absmax": z_absmax if with_z else None, "z_dtype": z_fp8}
            found, found_z = swiglu_backward_quantize(dz, gate_up, slot, fp8, **how)
            assert torch.equal(slot.nan_to_num(-1.0), largest.nan_to_num(-1.0))
            check_same(found, expected)
            assert (found_z is None) == (not with_z)
            if found_z is not None:
                check_same(found_z, reference.quantize(z, z_absmax, z_fp8, rows=False, transposed=True))


@pytest.mark.parametrize("fp8", reference.LARGEST, ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (16, 272), (144, 48), (128, 256)], ids=str)
@pytest.mark.parametrize(("device", "dtype"), QUANTIZED_PLACES)
@pytest.mark.usefixtures("poisoned")
def test_as_in_two_launches(shape: tuple[int, int], device: str, dtype: torch.dtype, fp8: torch.dtype) -> None:
    check_both_ways(*operands(*shape, device, dtype), fp8)


@settings(deadline=None, max_examples=10)
@given(n_rows=st.integers(1, 12), d_ff=st.integers(1, 20), seed=st.integers(0, 3))
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_any_shape(device: str, dtype: torch.dtype, n_rows: int, d_ff: int, seed: int) -> None:
    check_both_ways(*operands(16 * n_rows, 16 * d_ff, device, dtype, seed), E4M3, E5M2)


@pytest.mark.parametrize("of", ["dz", "gate", "up"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("device", "dtype"), QUANTIZED_PLACES)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # the interpreter's
def test_zero_nan_and_infinity_are_seen(device: str, dtype: torch.dtype, value: float, of: str) -> None:
    dz, gate_up = operands(32, 48, device, dtype)
    tensor = {"dz": dz, "gate": gate_up[:, :48], "up": gate_up[:, 48:]}[of]
    if value == 0:
        tensor.zero_()
    tensor[3, 5] = value
    check_both_ways(dz, gate_up, E4M3)


def test_strides_and_empty_tensors() -> None:
    dz, gate_up = operands(32, 48, "cpu", torch.float32)
    check_both_ways(dz.t().contiguous().t(), torch.cat([gate_up, gate_up], dim=1)[:, :96], E4M3)
    found, z = swiglu_backward_quantize(dz[:0], gate_up[:0], torch.zeros(()), E4M3, z_absmax=torch.zeros(()))
    assert (found.q.shape, found.q_t.shape, z.q_t.shape) == ((0, 96), (96, 0), (48, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_operator_passes_opcheck(device: str, dtype: torch.dtype) -> None:
    for z_absmax, transposed in ((torch.ones((), device=device), True), (None, False)):
        arguments = torch.zeros((), device=device), E4M3, transposed, z_absmax, E5M2
        torch.library.opcheck(swiglu_backward_quantize_op, (*operands(32, 16, device, dtype), *arguments))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    (dz, gate_up), slot = operands(32, 48, "cpu", torch.float32), torch.zeros(())
    with pytest.raises(ValueError, match=r"dz \(32, 48\) does not match the halves of gate_up \(32, 48\)"):
        swiglu_backward_quantize(dz, gate_up[:, :48], slot, E4M3)
    with pytest.raises(ValueError, match=r"dimensions 16 divides, got \(24, 48\)"):
        swiglu_backward_quantize(dz[:24], gate_up[:24], slot, E4M3)
    with pytest.raises(ValueError, match="not to torch.bfloat16"):
        swiglu_backward_quantize(dz, gate_up, slot, BF16)
    with pytest.raises(ValueError, match="absmax must be one float32 element on cpu"):
        swiglu_backward_quantize(dz, gate_up, torch.zeros(2), E4M3)
    monkeypatch.setattr("triton.JITFunction", object)  # what a kernel is without the interpreter
    with pytest.raises(ValueError, match=r"needs a CUDA device .* got a tensor on cpu"):
        swiglu_backward_quantize(dz, gate_up, slot, E4M3)


COMPILE = (
    ON_HOPPER
    + """
import importlib, json, sys
own = importlib.import_module("cs336_systems.kernels.swiglu_quantize")

dz, gate_up = torch.zeros(512, 4096, dtype=torch.bfloat16), torch.zeros(512, 8192, dtype=torch.bfloat16)
slot, with_z = torch.zeros(()), sys.argv[1] == "True"
fp8 = torch.float8_e4m3fn
own.swiglu_backward_quantize_op(dz, gate_up, slot, fp8, True, slot if with_z else None, fp8)
kernel = compiled["swiglu_backward_quantize_kernel"]
lines = kernel.asm["ptx"].splitlines()
wide = [line for line in lines if ".global.v4.b32" in line]
metadata = {"threads": 32 * kernel.metadata.num_warps, "shared": kernel.metadata.shared}
metadata |= {"loads": sum("ld." in line for line in wide), "stores": sum("st." in line for line in wide)}
metadata |= {"bytes": sum(f"st.{space}.b8" in line for line in lines for space in ("global", "shared"))}
metadata |= {"conversions": sum("cvt.rn.satfinite" in line for line in lines)}
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": metadata}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("with_z", [False, True])
def test_it_compiles_to_wide_accesses(with_z: bool) -> None:
    """16 bytes of each thread, both ways; two programs have room in registers; nothing goes by bytes."""
    found = report(COMPILE, with_z)
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["registers"] * found["threads"] * 2 <= 65536
    elements = found["conversions"] * 2 // (3 if with_z else 2)  # of a thread, of each matrix
    assert found["loads"] == 3 * elements // 8
    assert found["stores"] == (5 if with_z else 4) * elements // 16
    assert found["bytes"] == 0
