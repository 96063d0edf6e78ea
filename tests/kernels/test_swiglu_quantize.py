"""SwiGLU's backward into fp8: to the bit what it is in two launches that store it, and quantization of that."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.swiglu import empty_slopes, swiglu_backward, swiglu_forward
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


def slopes_of(gate_up: Tensor) -> Tensor:
    slopes = empty_slopes(gate_up)
    swiglu_forward(gate_up, slopes=slopes)
    return slopes


def check_both_ways(dz: Tensor, gate_up: Tensor, fp8: torch.dtype, z_fp8: torch.dtype = E4M3) -> None:
    """With and without the second orientation and z, twice."""
    dgate_up, z = swiglu_backward(dz, gate_up, with_product=True)
    slopes = slopes_of(gate_up)
    assert torch.equal(z.nan_to_num(-1.0), swiglu_forward(gate_up).nan_to_num(-1.0))
    largest, z_absmax = reference.absmax(dgate_up), reference.absmax(z)
    for transposed, with_z in ((True, True), (True, False), (False, True)):
        expected = reference.quantize(dgate_up, largest, fp8, transposed=transposed)
        for _ in range(2):
            slot = torch.zeros((), device=dz.device)
            how = {"transposed": transposed, "z_absmax": z_absmax if with_z else None, "z_dtype": z_fp8}
            found, found_z = swiglu_backward_quantize(dz, gate_up, slopes, slot, fp8, **how)
            assert torch.equal(slot.nan_to_num(-1.0), largest.nan_to_num(-1.0))
            check_same(found, expected)
            assert (found_z is None) == (not with_z)
            if found_z is not None:
                check_same(found_z, reference.quantize(z, z_absmax, z_fp8, rows=False, transposed=True))


def test_blocks_that_differ_by_little_are_not_passed_over() -> None:
    dz, gate_up = torch.ones(64, 16), torch.ones(64, 32)
    for i in range(4):
        gate_up[16 * i : 16 * i + 16, 16:] = 1 + 0.01 * i  # each block's steepest slope is the largest so far
    check_both_ways(dz, gate_up, E4M3)


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


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_slopes_are_the_steepest_of_each_block(device: str, dtype: torch.dtype) -> None:
    """Of 8 rows and 256 columns, those at the ends being fewer."""
    _, gate_up = operands(20, 272, device, dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    s = gate.sigmoid()
    steepest = torch.maximum((gate * s).abs(), (up * (s + gate * s * (1 - s))).abs())
    expected = [[block.max() for block in rows.split(256, dim=1)] for rows in steepest.split(8)]
    torch.testing.assert_close(slopes_of(gate_up).double().cpu(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
@pytest.mark.parametrize("flat", [False, True])
def test_gate_and_up_are_not_read_where_slopes_exclude_them(device: str, dtype: torch.dtype, flat: bool) -> None:
    """Told that all is flat, the first pass believes it."""
    dz, gate_up = operands(32, 48, device, dtype)
    slopes, slot = slopes_of(gate_up), torch.zeros((), device=device)
    swiglu_backward_quantize(dz, gate_up, slopes.zero_() if flat else slopes, slot, E4M3)
    assert (slot == 0) == flat


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # the interpreter's
def test_nan_is_seen_after_infinity(device: str, dtype: torch.dtype) -> None:
    """Infinity times a slope of zero, in a block whose bound is no more than infinity, which another has reached."""
    dz, gate_up = operands(64, 16, device, dtype)
    gate_up[40, 16:] = 0
    dz[3, 5] = dz[40, 5] = float("inf")
    gate_up[40, 5] = 0
    check_both_ways(dz, gate_up, E4M3)


def test_strides_and_empty_tensors() -> None:
    dz, gate_up = operands(32, 48, "cpu", torch.float32)
    check_both_ways(dz.t().contiguous().t(), torch.cat([gate_up, gate_up], dim=1)[:, :96], E4M3)
    nothing = dz[:0], gate_up[:0], slopes_of(gate_up[:0])
    found, z = swiglu_backward_quantize(*nothing, torch.zeros(()), E4M3, z_absmax=torch.zeros(()))
    assert (found.q.shape, found.q_t.shape, z.q_t.shape) == ((0, 96), (96, 0), (48, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_operator_passes_opcheck(device: str, dtype: torch.dtype) -> None:
    for z_absmax, transposed in ((torch.ones((), device=device), True), (None, False)):
        dz, gate_up = operands(32, 16, device, dtype)
        arguments = slopes_of(gate_up), torch.zeros((), device=device), E4M3, transposed, z_absmax, E5M2
        torch.library.opcheck(swiglu_backward_quantize_op, (dz, gate_up, *arguments))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    dz, gate_up = operands(32, 48, "cpu", torch.float32)
    slopes, slot = slopes_of(gate_up), torch.zeros(())
    with pytest.raises(ValueError, match=r"dz \(32, 48\) does not match the halves of gate_up \(32, 48\)"):
        swiglu_backward_quantize(dz, gate_up[:, :48], slopes, slot, E4M3)
    with pytest.raises(ValueError, match=r"dimensions 16 divides, got \(24, 48\)"):
        swiglu_backward_quantize(dz[:24], gate_up[:24], slopes[:3], slot, E4M3)
    with pytest.raises(ValueError, match="not to torch.bfloat16"):
        swiglu_backward_quantize(dz, gate_up, slopes, slot, BF16)
    with pytest.raises(ValueError, match="absmax must be one float32 element on cpu"):
        swiglu_backward_quantize(dz, gate_up, slopes, torch.zeros(2), E4M3)
    with pytest.raises(ValueError, match=r"slopes must be float32 of shape \(4, 1\) on cpu, got .* \(8, 1\) on cpu"):
        swiglu_backward_quantize(dz, gate_up, torch.zeros(8, 1), slot, E4M3)
    monkeypatch.setattr("triton.JITFunction", object)  # what a kernel is without the interpreter
    with pytest.raises(ValueError, match=r"needs a CUDA device .* got a tensor on cpu"):
        swiglu_backward_quantize(dz, gate_up, slopes, slot, E4M3)


COMPILE = (
    ON_HOPPER
    + """
import importlib, json, sys
own = importlib.import_module("cs336_systems.kernels.swiglu_quantize")

dz, gate_up = torch.zeros(512, 4096, dtype=torch.bfloat16), torch.zeros(512, 8192, dtype=torch.bfloat16)
slot, with_z = torch.zeros(()), sys.argv[1] == "True"
fp8 = torch.float8_e4m3fn
slopes = torch.zeros(64, 16)
own.swiglu_backward_quantize_op(dz, gate_up, slopes, slot, fp8, True, slot if with_z else None, fp8)
kernel = compiled["swiglu_backward_quantize_kernel"]
lines = kernel.asm["ptx"].splitlines()
wide = [line for line in lines if ".global.v4.b32" in line]
half = [line for line in lines if "st.global.v2.b32" in line]
metadata = {"threads": 32 * kernel.metadata.num_warps, "shared": kernel.metadata.shared}
metadata |= {"loads": sum("ld." in line for line in wide), "stores": sum("st." in line for line in wide)}
metadata |= {"half_stores": len(half)}
metadata |= {"bytes": sum(f"st.{space}.b8" in line for line in lines for space in ("global", "shared"))}
metadata |= {"conversions": sum("cvt.rn.satfinite" in line for line in lines)}
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": metadata}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("with_z", [False, True])
def test_it_compiles_to_wide_accesses(with_z: bool) -> None:
    """A thread loads 16 bytes, stores 8 of a row and 16 of a column, never one; two programs have room in registers."""
    found = report(COMPILE, with_z)
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["registers"] * found["threads"] * 2 <= 65536
    elements = found["conversions"] * 2 // (3 if with_z else 2)  # of a thread, of each matrix
    assert found["loads"] == 3 * elements // 8
    assert found["half_stores"] == 2 * elements // 8
    assert found["stores"] == (3 if with_z else 2) * elements // 16
    assert found["bytes"] == 0
