"""Kernels that quantize what they compute: to the bit what two launches give that store it in between.

RMSNorm's statistics are found without storing the norm. SwiGLU's gradients pass over blocks whose slopes exclude them.
"""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels import rms_norm as norms
from cs336_systems.kernels.rms_norm import add_rms_norm_forward, rms_norm_forward
from cs336_systems.kernels.rms_norm_quantize import add_rms_norm_absmax, rms_norm_absmax, rms_norm_quantize
from cs336_systems.kernels.swiglu import empty_slopes, swiglu_forward
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize
from tests.kernels.against_fp64 import INTERPRETED, PLACES, check_refused, random
from tests.kernels.test_quantize import AWKWARD, ON_CPU_AND_GPU, check_same
from tests.kernels.test_swiglu import backward

E4M3, E5M2, BF16, EPS = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, 1e-5
NAN, INFINITY = float("nan"), float("inf")


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


def norm_operands(n_rows: int, d: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"x": (n_rows, d), "branch": (n_rows, d), "gain": (d,)}
    return {name: random(shape, device, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


def check_norm(x: Tensor, branch: Tensor, gain: Tensor, fp8: torch.dtype) -> None:
    """With and without a branch, each orientation and both."""
    residual, *added = add_rms_norm_forward(x, branch, gain, EPS)
    for each, (stored, expected_rstd) in ((None, rms_norm_forward(x, gain, EPS)), (branch, added)):
        largest, slot, normed = reference.absmax(stored), torch.zeros((), device=x.device), x
        if each is None:
            rstd = rms_norm_absmax(x, gain, EPS, slot)
        else:
            normed, rstd = add_rms_norm_absmax(x, each, gain, EPS, slot)
            assert same(normed, residual)
        assert same(rstd, expected_rstd) and same(slot, largest)
        for how in ({}, {"transposed": True}, {"rows": False, "transposed": True}):
            expected = reference.quantize(stored, largest, fp8, **how)
            check_same(rms_norm_quantize(normed, gain, rstd, slot, fp8, **how), expected)


def swiglu_operands(n_rows: int, d_ff: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dz and gate | up."""
    return random((n_rows, d_ff), device, dtype), random((n_rows, 2 * d_ff), device, dtype, 1)


def slopes_of(gate_up: Tensor) -> Tensor:
    slopes = empty_slopes(gate_up)
    swiglu_forward(gate_up, slopes=slopes)
    return slopes


def check_swiglu(dz: Tensor, gate_up: Tensor, fp8: torch.dtype = E4M3, z_fp8: torch.dtype = E5M2) -> None:
    """With and without the second orientation and z."""
    (dgate_up, z), slopes = backward(dz, gate_up), slopes_of(gate_up)
    assert same(z, swiglu_forward(gate_up))
    largest, z_absmax = reference.absmax(dgate_up), reference.absmax(z)
    for transposed, with_z in ((True, True), (True, False), (False, True)):
        slot = torch.zeros((), device=dz.device)
        how = {"transposed": transposed, "z_absmax": z_absmax if with_z else None, "z_dtype": z_fp8}
        found, found_z = swiglu_backward_quantize(dz, gate_up, slopes, slot, fp8, **how)
        assert same(slot, largest)
        check_same(found, reference.quantize(dgate_up, largest, fp8, transposed=transposed))
        assert (found_z is None) == (not with_z)
        if found_z is not None:
            check_same(found_z, reference.quantize(z, z_absmax, z_fp8, rows=False, transposed=True))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtype", "fp8"), AWKWARD, ids=str)
@pytest.mark.parametrize("device", ON_CPU_AND_GPU)
@pytest.mark.usefixtures("poisoned")
def test_as_in_two_launches(shape: tuple[int, int], dtype: torch.dtype, fp8: torch.dtype, device: str) -> None:
    for each in (dtype,) if device == "cpu" else (torch.float32, BF16, torch.float16):
        check_norm(**norm_operands(*shape, device, each), fp8=fp8)
        check_swiglu(*swiglu_operands(*shape, device, each), fp8, E5M2 if fp8 == E4M3 else E4M3)


@pytest.mark.parametrize("d", [896, 1536, 3584, 4096])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_norm_at_the_widths_of_models(d: int, device: str) -> None:
    check_norm(**norm_operands(2064, d, device, BF16), fp8=E4M3)


@INTERPRETED
def test_rows_that_are_too_long_are_walked_over_and_strides_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, branch, gain = norm_operands(16, 48, "cpu", torch.float32).values()
    monkeypatch.setattr(norms, "tile_for", lambda d: norms.Tile(8, 32, 1, 3, 4, 4))
    gain = torch.stack((gain, gain), 1)[:, 0]
    check_norm(x.t().contiguous().t(), torch.cat([branch, x], dim=1)[:, :48], gain, E4M3)
    dz, gate_up = swiglu_operands(16, 16, "cpu", torch.float32)
    check_swiglu(dz.t().contiguous().t(), torch.cat([gate_up, gate_up], dim=1)[:, :32])


@pytest.mark.slow
@pytest.mark.parametrize("value", [NAN, -INFINITY])
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")  # the interpreter's
def test_nan_and_infinity_are_seen(device: str, dtype: torch.dtype, value: float) -> None:
    dz, gate_up = swiglu_operands(16, 16, device, dtype)
    for check, tensors in (
        (check_norm, norm_operands(16, 16, device, dtype)),
        (check_swiglu, {"dz": dz, "gate": gate_up[:, :16], "up": gate_up[:, 16:]}),
    ):
        for name in tensors:
            changed = {other: each.clone() for other, each in tensors.items()}
            changed[name].view(-1)[5] = value
            if check is check_swiglu:
                check_swiglu(changed["dz"], torch.cat((changed["gate"], changed["up"]), dim=1))
            else:
                check_norm(**changed, fp8=E4M3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # the interpreter's
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_blocks_are_passed_over_only_where_their_slopes_exclude_them(device: str, dtype: torch.dtype) -> None:
    """Slopes are the steepest of each block of 8 rows and 256 columns, those at the ends being fewer."""
    _, gate_up = swiglu_operands(20, 272, device, dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    s = gate.sigmoid()
    steepest = torch.maximum((gate * s).abs(), (up * (s + gate * s * (1 - s))).abs())
    expected = [[block.max() for block in rows.split(256, dim=1)] for rows in steepest.split(8)]
    torch.testing.assert_close(slopes_of(gate_up).double().cpu(), torch.tensor(expected, dtype=torch.float64))
    dz, gate_up = swiglu_operands(64, 16, device, dtype)
    for slopes, found in ((slopes_of(gate_up), True), (slopes_of(gate_up).zero_(), False)):
        slot = torch.zeros((), device=device)  # told that all is flat, the first pass believes it
        swiglu_backward_quantize(dz, gate_up, slopes, slot, E4M3)
        assert (slot > 0) == found
    for i in range(4):
        gate_up[16 * i : 16 * i + 16, 16:] = 1 + 0.01 * i  # each block's steepest slope is the largest so far
    check_swiglu(torch.ones_like(dz), gate_up)
    # Infinity times a slope of zero is NaN, in a block whose bound is no more than infinity, which another has reached.
    gate_up[40, 16:] = gate_up[40, 5] = 0
    dz[3, 5] = dz[40, 5] = INFINITY
    check_swiglu(dz, gate_up)


@INTERPRETED
def test_empty_tensors_and_refusals() -> None:
    x, _, gain = norm_operands(32, 48, "cpu", torch.float32).values()
    dz, gate_up = swiglu_operands(32, 48, "cpu", torch.float32)
    rstd, slot, slopes = torch.ones(32), torch.zeros(()), slopes_of(gate_up)
    found = rms_norm_quantize(x[:0], gain, rms_norm_absmax(x[:0], gain, EPS, slot), slot, E4M3, transposed=True)
    assert (found.q.shape, found.q_t.shape) == ((0, 48), (48, 0))
    nothing = dz[:0], gate_up[:0], slopes_of(gate_up[:0])
    found, z = swiglu_backward_quantize(*nothing, slot.clone(), E4M3, z_absmax=slot)
    assert (found.q.shape, found.q_t.shape, z.q_t.shape) == ((0, 96), (96, 0), (48, 0))
    norm, gated = rms_norm_quantize, swiglu_backward_quantize
    check_refused(
        (lambda: norm(x, rstd, rstd, slot, E4M3), r"weight \(32,\) .* x \(32, 48\)"),
        (lambda: norm(x, gain, gain, slot, E4M3), r"rstd .* \(32,\) .* \(48,\)"),
        (lambda: gated(dz, gate_up[:, :48], slopes, slot, E4M3), r"dz \(32, 48\) .* gate_up \(32, 48\)"),
        (lambda: gated(dz, gate_up, slopes, torch.zeros(2), E4M3), r"absmax .* \(2,\)"),
        (lambda: gated(dz, gate_up, torch.zeros(8, 1), slot, E4M3), r"slopes .* \(4, 1\) .* \(8, 1\)"),
    )
