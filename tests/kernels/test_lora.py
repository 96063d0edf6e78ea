"""Kernels of low-rank adapters against fp64: parts, ranks and shapes that no tile divides, and what must be refused."""

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import lora, lora_reference
from cs336_systems.kernels.lora_reference import LowRank, Scaled
from tests.kernels.against_fp64 import PLACES, check, check_refused, random

SHAPES = [
    (70, 200, (136, 72, 24), 16),  # as q, k and v
    (33, 72, (130, 130), 5),
    (20, 530, (64,), 70),  # more ranks than a tile has
]
"""R rows, K columns of x, columns of y by part, and the rank of each."""


def make(rows: int, width: int, widths: tuple[int, ...], rank: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """x, dy, a, b, da and db, the latter for gradients to be added to."""
    shapes = (rows, width), (rows, sum(widths)), (len(widths) * rank, width), (sum(widths), rank)
    found = [random(shape, device, dtype, seed) for seed, shape in enumerate((*shapes, *shapes[2:]))]
    found[3] /= 4
    return found


def all_of(kernels, widths: tuple[int, ...], tensors: list[Tensor]) -> dict[str, Tensor]:
    """Everything that an adapter computes, in the order of a step; the tensors stay as they are."""
    x, dy, a, b, da, db = (tensor.clone() for tensor in tensors)
    h = kernels.shrink(Scaled(x), a.T, (a.shape[1],), 1.5)
    y, dx = dy.clone(), x.clone()
    kernels.expand_(y, LowRank(h, b, widths))
    dh = kernels.shrink(Scaled(dy), b, widths, 1.5)
    kernels.expand_(dx, LowRank(dh, a.T, (a.shape[1],)))
    kernels.factor_gradients_(da, db, Scaled(x), Scaled(dy), h, dh, widths, True)
    return {"h": h, "y": y, "dh": dh, "dx": dx, "da": da, "db": db}


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("rows", "width", "widths", "rank"), SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_values(rows: int, width: int, widths: tuple[int, ...], rank: int, device: str, dtype: torch.dtype) -> None:
    tensors = make(rows, width, widths, rank, device, dtype)
    found, eager = (all_of(kernels, widths, tensors) for kernels in (lora, lora_reference))
    exact = all_of(lora_reference, widths, [tensor.double() for tensor in tensors])
    for name, value in found.items():
        check(name, value, eager[name], exact[name])
    again = all_of(lora, widths, tensors)
    assert all(torch.equal(again[name], value) for name, value in found.items())


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_one_gradient_strided_inputs_and_memory_to_be_overwritten(device: str, dtype: torch.dtype) -> None:
    """x and dy as quantized products have them, by columns; without accumulation, NaN in memory does not stay."""
    widths = (40, 24)
    x, dy, a, b, da, db = make(50, 72, widths, 8, device, dtype)
    h, dh = lora.shrink(Scaled(x), a.T, (72,), 2.0), lora.shrink(Scaled(dy), b, widths, 2.0)
    assert torch.equal(lora.shrink(Scaled(x.T.contiguous().T), a.T, (72,), 2.0), h)
    gradients = [torch.full_like(gradient, torch.nan) for gradient in (da, db)]
    lora.factor_gradients_(*gradients, Scaled(x), Scaled(dy), h, dh, widths, False)
    by_columns = [torch.full_like(gradient, torch.nan) for gradient in (da, db)]
    lora.factor_gradients_(by_columns[0], None, Scaled(x.T.contiguous().T), Scaled(dy), h, dh, widths, False)
    lora.factor_gradients_(None, by_columns[1], Scaled(x), Scaled(dy.T.contiguous().T), h, dh, widths, False)
    assert all(map(torch.equal, gradients, by_columns))
    assert not any(gradient.isnan().any() for gradient in gradients)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_quantized_matrices_are_read_as_they_are(device: str, dtype: torch.dtype) -> None:
    """With one scale; x by columns, as what products keep of it is transposed.

    Scales are powers of two, so only the order of sums can differ: on a GPU, tensor cores take the columns of a
    converted matrix in another order. A change of the last bit in fp32 moves some numbers by a step of bf16.
    """
    widths, fp8 = (136, 72), (torch.float8_e4m3fn, torch.float8_e5m2)
    x, dy, a, b, da, db = make(50, 96, widths, 8, device, dtype)
    scales = torch.tensor([0.25, 0.125], device=device)
    narrow = [Scaled(each.to(kind), scale) for each, kind, scale in zip((x, dy), fp8, scales, strict=True)]
    wide = [Scaled(each.to(dtype)) for each in narrow]
    found = []
    for x, dy in (narrow, wide):
        h, dh = lora.shrink(x, a.T, (96,), 2.0), lora.shrink(dy, b, widths, 2.0)
        gradients = da.clone(), db.clone()
        by_columns = x._replace(values=x.values.T.contiguous().T)
        lora.factor_gradients_(*gradients, by_columns, dy, h, dh, widths, True)
        found.append((h, dh, *gradients))
    for read, converted in zip(*found, strict=True):
        assert (read - converted).norm() <= (0.0 if device == "cpu" else 2**-9) * converted.norm()


def test_refusals() -> None:
    x, dy, _, b, da, db = make(6, 8, (5, 3), 2, "cpu", torch.float32)
    h, dh = torch.zeros(6, 4), torch.zeros(6, 4)
    check_refused(
        (
            lambda: lora.shrink(Scaled(x), b, (5, 2), 1.0),
            r"parts of \(5, 2\) columns do not fit .* \(6, 8\) .* \(8, 2\)",
        ),
        (lambda: lora.shrink(Scaled(x), b.double(), (5, 3), 1.0), "torch.float64"),
        (lambda: lora.expand_(dy, LowRank(h[:, :3], b, (5, 3))), r"h \(6, 3\) .* 6 rows of rank 2"),
        (lambda: lora.expand_(dy.T.contiguous().T, LowRank(h, b, (5, 3))), r"strides \(1, 6\)"),
        (
            lambda: lora.factor_gradients_(da.T, db, Scaled(x), Scaled(dy), h, dh, (5, 3), True),
            r"da must be contiguous",
        ),
        (
            lambda: lora.factor_gradients_(da, db, Scaled(x, h[0]), Scaled(dy), h, dh, (5, 3), True),
            "must both have a scale, or neither",
        ),
        (
            lambda: lora.factor_gradients_(da, db[:7], Scaled(x), Scaled(dy), h, dh, (5, 3), True),
            r"shape \(8, 2\) .* \(7, 2\)",
        ),
        (lambda: lora.factor_gradients_(da, db, Scaled(x[:5]), Scaled(dy), h, dh, (5, 3), True), r"\(5, 8\), \(6, 8\)"),
    )
