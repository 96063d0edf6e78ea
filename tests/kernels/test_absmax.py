"""The largest magnitude, by a kernel of its own and by those that write the tensor: exact, and nothing else changes."""

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.absmax import absmax, row_and_column_absmax
from cs336_systems.kernels.rms_norm import add_rms_norm_forward, rms_norm_backward, rms_norm_forward
from cs336_systems.kernels.rms_norm_kernels import MAX_BLOCK_D
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.kernels.swiglu import swiglu_backward_, swiglu_forward
from tests.kernels.against_fp64 import PLACES, WITH_BF16, check_refused, random

BF16 = torch.bfloat16
EPS = 1e-5


@pytest.mark.parametrize("shape", [(1,), (7, 5), (3, 4096), (65, 129), (8193,), (0, 4), ()], ids=str)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
def test_absmax(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    x = random(shape, device, dtype)
    assert torch.equal(absmax(x), reference.absmax(x))
    if x.dim() == 2 and x.numel():
        for found, expected in zip(row_and_column_absmax(x), reference.row_and_column_absmax(x), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(absmax(x.t()), reference.absmax(x))
        assert torch.equal(row_and_column_absmax(x.t())[0], row_and_column_absmax(x)[1].t())


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_nan_is_above_infinity(device: str, dtype: torch.dtype, value: float) -> None:
    x = random((70, 40), device, dtype)
    x[3, 4], x[69, 0] = value, math.inf
    rows, columns = row_and_column_absmax(x)
    for found in (absmax(x), rows[3], columns[0, 4]):
        assert found.isnan() if math.isnan(value) else found == math.inf
    assert rows[0].isfinite()
    assert columns[0, 1].isfinite()


Writer = Callable[[Tensor, "Tensor | None"], tuple[Tensor, ...]]
"""Of a first input, what is written: that whose largest magnitude counts is the first."""


def writers(n_rows: int, d: int, device: str, dtype: torch.dtype) -> dict[str, tuple[tuple[int, int], Writer]]:
    """By name, the shape of the first input, and the kernel."""
    gain, other, dresidual = random((d,), device, dtype, 1), random((n_rows, d), device, dtype, 2), None
    angles = random((n_rows, 4), "cpu", torch.float32, 3).to(device)

    def norm(x: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        return rms_norm_forward(x, gain, EPS, slot)

    def add_norm(x: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        residual, y, rstd = add_rms_norm_forward(x, other, gain, EPS, slot)
        return y, residual, rstd

    def norm_backward(dy: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        return rms_norm_backward(dy, other, gain, None, dresidual, EPS, slot)

    def norm_backward_from_rstd(dy: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        rstd = rms_norm_forward(other, gain, EPS)[1]
        return rms_norm_backward(dy, other, gain, rstd, dy, absmax=slot)

    def swiglu(gate_up: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        return (swiglu_forward(gate_up, slot),)

    def swiglu_backward(gate_up: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        dgate_up, dz = gate_up.clone(), other.clone()
        swiglu_backward_(dz, dgate_up, with_product=True, absmax=slot)
        return dgate_up, dz

    def rotate_back(dqkv: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        dqkv = dqkv.clone()
        rotate_(dqkv, angles.cos(), angles.sin(), 2, 1, inverse=True, absmax=slot)
        return (dqkv,)

    wide = (n_rows, 2 * d)
    return {
        "rms_norm": ((n_rows, d), norm),
        "add_rms_norm": ((n_rows, d), add_norm),
        "rms_norm_backward": ((n_rows, d), norm_backward),
        "rms_norm_backward_from_rstd": ((n_rows, d), norm_backward_from_rstd),
        "swiglu": (wide, swiglu),
        "swiglu_backward": (wide, swiglu_backward),
        "rotate_back": ((n_rows, 32), rotate_back),  # 2 heads of q, one of k and one of v, of 8 elements
    }


NAMES = list(writers(1, 1, "cpu", torch.float32))


def check_writer(name: str, n_rows: int, d: int, device: str, dtype: torch.dtype) -> None:
    shape, writer = writers(n_rows, d, device, dtype)[name]
    x = random(shape, device, dtype, 4)
    plain, slot = writer(x, None), torch.zeros((), device=device)
    for _ in range(2):
        for found, expected in zip(writer(x, slot), plain, strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(slot, reference.absmax(plain[0]))
    slot.fill_(1e6)
    writer(x, slot)
    assert slot == 1e6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 2), (33, 256), (70, 300)], ids=str)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
def test_of_what_is_written_in_the_same_bits(
    name: str, shape: tuple[int, int], device: str, dtype: torch.dtype
) -> None:
    check_writer(name, *shape, device, dtype)


@settings(deadline=None, max_examples=10)
@given(n_rows=st.integers(1, 40), d=st.integers(1, 300))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_of_what_is_written_at_any_shape(name: str, device: str, dtype: torch.dtype, n_rows: int, d: int) -> None:
    check_writer(name, n_rows, d, device, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_of_long_rows(name: str, device: str, dtype: torch.dtype) -> None:
    check_writer(name, 5, MAX_BLOCK_D + 3, device, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's
def test_what_is_not_finite_comes_through(name: str, value: float, device: str, dtype: torch.dtype) -> None:
    shape, writer = writers(8, 16, device, dtype)[name]
    x, slot = random(shape, device, dtype), torch.zeros((), device=device)
    x[5, -1] = value  # of v, of up
    largest = reference.absmax(writer(x, slot)[0])
    assert largest.isnan() if math.isnan(value) else not largest.isfinite()
    assert slot.isnan() if largest.isnan() else slot == largest


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered")  # the interpreter's
def test_nothing_that_does_not_exist_counts(device: str, dtype: torch.dtype) -> None:
    """Rows past the end, where without eps rstd is infinite, and columns past the end."""
    x, gain, slot = torch.ones(33, 5, device=device, dtype=dtype), *(torch.ones(n, device=device) for n in (5, 1))
    slot.zero_()
    y, _ = rms_norm_forward(x, gain.to(dtype), 0.0, slot)
    assert slot == 1 == y.max()
    slot.zero_()
    dx, _ = rms_norm_backward(x, x, gain.to(dtype), None, None, 0.0, slot)
    assert slot == dx.abs().max()


def test_refusals() -> None:
    gate_up, angles = torch.zeros(4, 16), torch.zeros(4, 2)
    for slot in (torch.zeros(2), torch.zeros((), dtype=BF16)):
        said = rf"absmax must be one float32 element on cpu, got {slot.dtype} of shape \({'2,' if slot.dim() else ''}\)"
        dz = gate_up[:, :8].clone()
        check_refused(
            (lambda s=slot: swiglu_forward(gate_up, s), said),
            (lambda s=slot, dz=dz: swiglu_backward_(dz, gate_up, with_product=False, absmax=s), said),
            (lambda s=slot: rotate_(gate_up, angles, angles, 2, 1, absmax=s), said),
            (lambda s=slot: rms_norm_forward(gate_up, gate_up[0], EPS, s), said),
        )
    check_refused(
        (lambda: row_and_column_absmax(torch.zeros(4)), r"got \(4,\)"),
        (lambda: absmax(gate_up.double()), "got torch.float64"),
    )
