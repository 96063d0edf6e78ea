"""SwiGLU's backward into fp8: to the bit what it is in two launches that store it, and quantization of that."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.swiglu import empty_slopes, swiglu_forward
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize
from tests.kernels.against_fp64 import PLACES, WITH_BF16, check_refused, random
from tests.kernels.test_quantize import check_same
from tests.kernels.test_swiglu import backward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16


def operands(n_rows: int, d_ff: int, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """dz and gate | up."""
    return random((n_rows, d_ff), device, dtype, seed), random((n_rows, 2 * d_ff), device, dtype, seed + 1)


def slopes_of(gate_up: Tensor) -> Tensor:
    slopes = empty_slopes(gate_up)
    swiglu_forward(gate_up, slopes=slopes)
    return slopes


def check_both_ways(dz: Tensor, gate_up: Tensor, fp8: torch.dtype, z_fp8: torch.dtype = E4M3) -> None:
    """With and without the second orientation and z."""
    dgate_up, z = backward(dz, gate_up)
    slopes = slopes_of(gate_up)
    assert torch.equal(z.nan_to_num(-1.0), swiglu_forward(gate_up).nan_to_num(-1.0))
    largest, z_absmax = reference.absmax(dgate_up), reference.absmax(z)
    for transposed, with_z in ((True, True), (True, False), (False, True)):
        expected = reference.quantize(dgate_up, largest, fp8, transposed=transposed)
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


@pytest.mark.parametrize(("shape", "fp8"), [((16, 16), E5M2), ((16, 272), E4M3), ((144, 48), E5M2)], ids=str)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
@pytest.mark.usefixtures("poisoned")
def test_as_in_two_launches(shape: tuple[int, int], device: str, dtype: torch.dtype, fp8: torch.dtype) -> None:
    check_both_ways(*operands(*shape, device, dtype), fp8, E5M2 if fp8 == E4M3 else E4M3)


@pytest.mark.parametrize("of", ["dz", "gate", "up"])
@pytest.mark.parametrize("value", [0.0, float("nan"), -float("inf")])
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
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


def test_refusals() -> None:
    dz, gate_up = operands(32, 48, "cpu", torch.float32)
    slopes, slot, to = slopes_of(gate_up), torch.zeros(()), swiglu_backward_quantize
    check_refused(
        (lambda: to(dz, gate_up[:, :48], slopes, slot, E4M3), r"dz \(32, 48\) .* gate_up \(32, 48\)"),
        (lambda: to(dz[:24], gate_up[:24], slopes[:3], slot, E4M3), r"got \(24, 48\)"),
        (lambda: to(dz, gate_up, slopes, slot, BF16), "not to torch.bfloat16"),
        (lambda: to(dz, gate_up, slopes, torch.zeros(2), E4M3), r"absmax .* \(2,\)"),
        (lambda: to(dz, gate_up, torch.zeros(8, 1), slot, E4M3), r"slopes .* \(4, 1\) .* \(8, 1\)"),
    )
