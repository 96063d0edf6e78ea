"""The largest magnitude, by a kernel of its own and by those that write the tensor: exact, and nothing else changes."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.absmax import absmax, row_and_column_absmax
from cs336_systems.kernels.rms_norm import MAX_BLOCK_D, add_rms_norm_forward, rms_norm_backward, rms_norm_forward
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.kernels.swiglu import swiglu_backward_, swiglu_forward
from tests.kernels.against_fp64 import PLACES, WITH_BF16, check_refused, random

BF16 = torch.bfloat16
EPS = 1e-5


@pytest.mark.parametrize("shape", [(7, 5), (65, 129), (8193,), (0, 4), ()], ids=str)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
def test_absmax(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    x = random(shape, device, dtype)
    assert torch.equal(absmax(x), reference.absmax(x))
    if x.dim() == 2 and x.numel():
        for found, expected in zip(row_and_column_absmax(x), reference.row_and_column_absmax(x), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(absmax(x.t()), reference.absmax(x))
        assert torch.equal(row_and_column_absmax(x.t())[0], row_and_column_absmax(x)[1].t())


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_nan_is_above_infinity(device: str, dtype: torch.dtype) -> None:
    x = random((70, 40), device, dtype)
    x[3, 4], x[69, 0] = -math.nan, -math.inf
    rows, columns = row_and_column_absmax(x)
    assert all(found.isnan() for found in (absmax(x), rows[3], columns[0, 4]))
    assert rows[69] == columns[0, 0] == math.inf
    assert rows[0].isfinite() and columns[0, 1].isfinite()


Writer = Callable[[Tensor, "Tensor | None"], tuple[Tensor, ...]]
"""Of a first input, what is written: that whose largest magnitude counts is the first."""


def writers(n_rows: int, d: int, device: str, dtype: torch.dtype) -> dict[str, tuple[tuple[int, int], Writer]]:
    """By name, the shape of the first input, and the kernel."""
    gain, other = random((d,), device, dtype, 1), random((n_rows, d), device, dtype, 2)
    angles = random((n_rows, 4), "cpu", torch.float32, 3).to(device)

    def norm(x: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        return rms_norm_forward(x, gain, EPS, slot)

    def add_norm(x: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        residual, y, rstd = add_rms_norm_forward(x, other, gain, EPS, slot)
        return y, residual, rstd

    def norm_backward(dy: Tensor, slot: Tensor | None) -> tuple[Tensor, ...]:
        return rms_norm_backward(dy, other, gain, rms_norm_forward(other, gain, EPS)[1], dy, slot)

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
        "swiglu": (wide, swiglu),
        "swiglu_backward": (wide, swiglu_backward),
        "rotate_back": ((n_rows, 32), rotate_back),  # 2 heads of q, one of k and one of v, of 8 elements
    }


NAMES = list(writers(1, 1, "cpu", torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n_rows", "d"), [*((name, 33, 300) for name in NAMES), (NAMES[2], 2, MAX_BLOCK_D + 3)]
)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
def test_of_what_is_written_in_the_same_bits(name: str, n_rows: int, d: int, device: str, dtype: torch.dtype) -> None:
    shape, writer = writers(n_rows, d, device, dtype)[name]
    x = random(shape, device, dtype, 4)
    plain, slot = writer(x, None), torch.zeros((), device=device)
    for found, expected in zip(writer(x, slot), plain, strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(slot, reference.absmax(plain[0]))
    slot.fill_(1e6)
    writer(x, slot)
    assert slot == 1e6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's
def test_what_is_not_finite_comes_through(name: str, device: str, dtype: torch.dtype) -> None:
    shape, writer = writers(8, 16, device, dtype)[name]
    for value in (math.nan, math.inf):
        x, slot = random(shape, device, dtype), torch.zeros((), device=device)
        x[5, -1] = value  # of v, of up
        largest = reference.absmax(writer(x, slot)[0])
        assert largest.isnan() if math.isnan(value) else not largest.isfinite()
        assert slot.isnan() if largest.isnan() else slot == largest


def test_refusals() -> None:
    x = torch.zeros(4, 16)
    check_refused(
        *((lambda s=slot: swiglu_forward(x, s), "absmax") for slot in (torch.zeros(2), torch.zeros((), dtype=BF16))),
        (lambda: row_and_column_absmax(torch.zeros(4)), r"got \(4,\)"),
        (lambda: absmax(x.double()), "got torch.float64"),
    )
