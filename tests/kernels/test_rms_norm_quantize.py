"""RMSNorm into fp8: to the bit what it is stored and then quantized, and its statistics without storing it."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.rms_norm import add_rms_norm_forward, rms_norm_forward
from cs336_systems.kernels.rms_norm_quantize import add_rms_norm_absmax, rms_norm_absmax, rms_norm_quantize
from tests.kernels.against_fp64 import ON_GPU, WITH_BF16, check_refused, random
from tests.kernels.test_quantize import check_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
EPS = 1e-5


def operands(n_rows: int, d: int, device: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """x, a branch and a gain."""
    shapes = (n_rows, d), (n_rows, d), (d,)
    return [random(shape, device, dtype, seed + i) for i, shape in enumerate(shapes)]


def check_both_ways(x: Tensor, branch: Tensor, gain: Tensor, fp8: torch.dtype, eps: float = EPS) -> None:
    """With and without a branch, each orientation and both."""
    residual, y, rstd = add_rms_norm_forward(x, branch, gain, eps)
    for each, norm in ((None, rms_norm_forward(x, gain, eps)), (branch, (y, rstd))):
        stored, expected_rstd = norm
        largest = reference.absmax(stored)
        slot, normed = torch.zeros((), device=x.device), x
        if each is None:
            found_rstd = rms_norm_absmax(x, gain, eps, slot)
        else:
            normed, found_rstd = add_rms_norm_absmax(x, each, gain, eps, slot)
            assert torch.equal(normed.nan_to_num(-1.0), residual.nan_to_num(-1.0))
        assert torch.equal(found_rstd.nan_to_num(-1.0), expected_rstd.nan_to_num(-1.0))
        assert torch.equal(slot.nan_to_num(-1.0), largest.nan_to_num(-1.0))
        for how in ({}, {"transposed": True}, {"rows": False, "transposed": True}):
            expected = reference.quantize(stored, largest, fp8, **how)
            check_same(rms_norm_quantize(normed, gain, found_rstd, slot, fp8, **how), expected)


@pytest.mark.parametrize(("shape", "fp8"), [((16, 16), E5M2), ((16, 272), E4M3), ((144, 48), E5M2)], ids=str)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
@pytest.mark.usefixtures("poisoned")
def test_as_in_two_launches(shape: tuple[int, int], device: str, dtype: torch.dtype, fp8: torch.dtype) -> None:
    check_both_ways(*operands(*shape, device, dtype), fp8)


@pytest.mark.parametrize("d", [896, 1536, 2048, 3584, 4096])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_as_in_two_launches_at_the_widths_of_models(d: int, device: str) -> None:
    check_both_ways(*operands(2064, d, device, BF16), E4M3)


@pytest.mark.parametrize(
    ("of", "value"), [("x", 0.0), ("branch", float("nan")), ("x", -float("inf")), ("gain", float("inf"))]
)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")  # the interpreter's
def test_zero_nan_and_infinity_are_seen(device: str, dtype: torch.dtype, value: float, of: str) -> None:
    tensors = dict(zip(("x", "branch", "gain"), operands(32, 48, device, dtype), strict=True))
    if value == 0:
        tensors[of].zero_()
    tensors[of].view(-1)[5] = value
    check_both_ways(*tensors.values(), E4M3)


def test_strides_and_empty_tensors() -> None:
    x, branch, gain = operands(32, 48, "cpu", torch.float32)
    gain = torch.stack((gain, gain), 1)[:, 0]
    check_both_ways(x.t().contiguous().t(), torch.cat([branch, x], dim=1)[:, :48], gain, E4M3)
    slot = torch.zeros(())
    found = rms_norm_quantize(x[:0], gain, rms_norm_absmax(x[:0], gain, EPS, slot), slot, E4M3, transposed=True)
    assert (found.q.shape, found.q_t.shape) == ((0, 48), (48, 0))


def test_refusals() -> None:
    x, _, gain = operands(32, 48, "cpu", torch.float32)
    rstd, slot, to = torch.ones(32), torch.zeros(()), rms_norm_quantize
    check_refused(
        (lambda: to(x, rstd, rstd, slot, E4M3), r"weight \(32,\) .* x \(32, 48\)"),
        (lambda: to(x[:24], gain, rstd[:24], slot, E4M3), r"got \(24, 48\)"),
        (lambda: to(x, gain, rstd, slot, BF16), "not to torch.bfloat16"),
        (lambda: to(x, gain, rstd, slot, E4M3, rows=False), "neither"),
        (lambda: to(x, gain, rstd, torch.zeros(2), E4M3), r"absmax .* \(2,\)"),
        (lambda: to(x, gain, gain, slot, E4M3), r"rstd .* \(32,\) .* \(48,\)"),
    )
