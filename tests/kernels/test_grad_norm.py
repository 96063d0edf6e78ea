"""The fused norm against fp64: many sizes and dtypes at once, the same bits again, NaN and inf, and the clip factor."""

import math

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.grad_norm import CHUNK, grad_norm, norm_table
from tests.kernels.against_fp64 import check_refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-6
"""Derived in the module: 0.9e-6 for the sums of squares, half an fp32 ulp (6e-8) for the root."""


def make(sizes: list[int], dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, generator=generator).to(DEVICE, dtypes[i % len(dtypes)]) * 10.0 ** (i % 5 - 2)
        for i, n in enumerate(sizes)
    ]


def exact(tensors: list[Tensor]) -> float:
    return torch.cat([x.double().flatten() for x in tensors]).norm().item()


@pytest.mark.parametrize("sizes", [[0], [0, 3, 0, 4097, 1], [CHUNK + 1], [3] * 60], ids=len)
def test_values(sizes: list[int]) -> None:
    tensors = make(sizes)
    norm = grad_norm(tensors)
    assert (norm.dtype, norm.shape, norm.device.type) == (torch.float32, (), DEVICE)
    assert norm.item() == pytest.approx(exact(tensors), rel=TOLERANCE)


def test_unaligned_and_transposed_tensors_count_in_full() -> None:
    (x,) = make([9001], (torch.bfloat16,))
    tensors = [x[1:], x[: 50 * 40].view(50, 40).t(), x[3:4100]]
    assert grad_norm(tensors).item() == pytest.approx(exact(tensors), rel=TOLERANCE)


def test_a_kept_table_follows_what_changes_and_bits_repeat() -> None:
    tensors, others, table = make([5000, 7, 1030]), make([5000, 7, 1030])[::-1], norm_table()
    first = grad_norm(tensors, table)
    owners = table.owners
    assert torch.equal(grad_norm(tensors, table), first)
    moved = [x.clone() for x in tensors]
    assert torch.equal(grad_norm(moved, table), first)
    assert table.owners is owners  # sizes are as they were
    assert grad_norm(others, table).item() == pytest.approx(exact(others), rel=TOLERANCE)
    tensors[0].zero_()
    assert grad_norm(tensors, table).item() == pytest.approx(exact(tensors), rel=TOLERANCE)


def test_nan_and_inf_are_reported() -> None:
    for value, dtype in ((math.nan, torch.float32), (-math.inf, torch.bfloat16)):
        tensors = make([100, 2000], (dtype,))
        tensors[1][1999] = value
        norm = grad_norm(tensors)
        assert norm.isnan() if math.isnan(value) else norm == math.inf


def test_refusals() -> None:
    wide, spread = torch.zeros(3, dtype=torch.float64, device=DEVICE), make([8], (torch.float32,))[0][::2]
    check_refused(
        (lambda: grad_norm([]), "at least one tensor"),
        (lambda: grad_norm([*make([3]), wide]), r"tensor 1 is torch\.float64"),
        (lambda: grad_norm([spread]), r"tensor 0 is torch\.float32 .* strides \(2,\)"),
    )


@pytest.mark.gpu
def test_beyond_31_bits_and_without_waiting() -> None:
    x = torch.ones(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    table = norm_table()
    grad_norm([x], table)
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = grad_norm([x], table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(math.sqrt(2**31 + 4 + 9), rel=TOLERANCE)
