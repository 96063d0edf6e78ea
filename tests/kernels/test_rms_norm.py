"""RMSNorm, with and without the add in front: against fp64, its written-out interface, operators, and compiled code."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import rms_norm as module
from cs336_systems.kernels.rms_norm import (
    MAX_BLOCK_D,
    add_rms_norm,
    add_rms_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from cs336_systems.model import ops
from tests.kernels.against_fp64 import INTERPRETED, PLACES, check, check_refused, random

Function = Callable[..., Tensor | tuple[Tensor, ...]]
EPS = 1e-5
SHAPES = [(70, 2), (2, 3, 37), (40, 300), (5,), (0, 8), (4, 0), (2, MAX_BLOCK_D + 3)]


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x, weight, EPS)


def add_reference(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x + branch, reference(x + branch, weight)


def make(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Four like x, for x, branch, dy and dresidual; and a gain."""
    shapes = [shape] * 4 + [shape[-1:]]
    return [random(size, device, dtype, seed) for seed, size in enumerate(shapes)]


def values_and_gradients(
    function: Function, inputs: Sequence[Tensor], arriving: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    gradients = torch.autograd.grad(outs, leaves, [g.to(dtype) for g in arriving])
    return [*(x.detach() for x in outs), *gradients]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    x, branch, dy, dresidual, weight = make(shape, device, dtype)

    for ours, formula, inputs, arriving in (
        (rms_norm, reference, (x, weight), (dy,)),
        (add_rms_norm, add_reference, (x, branch, weight), (dresidual, dy)),
    ):
        results = (
            values_and_gradients(function, inputs, arriving, wide)
            for function, wide in (
                (lambda *leaves, ours=ours: ours(*leaves, EPS), dtype),
                (formula, dtype),
                (formula, torch.float64),
            )
        )
        for i, versions in enumerate(zip(*results, strict=True)):
            check(f"{ours.__name__} {i}", *versions)


def check_both_forms(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual and its statistic; norm and statistic are the same bits with the add in front and without."""
    residual, *added = add_rms_norm_forward(x, branch, weight, EPS)
    assert all(map(torch.equal, added, rms_norm_forward(residual, weight, EPS)))
    return residual, added[1]


@INTERPRETED  # as each width is compiled for itself
def test_rows_that_are_too_long_are_walked_over(monkeypatch: pytest.MonkeyPatch) -> None:
    x, branch, dy, dresidual, weight = make((7, 150), "cpu", torch.float32)
    monkeypatch.setattr(module, "tile_for", lambda d: module.Tile(1, 64, 1, 3, 4, 4))
    residual, rstd = check_both_forms(x, branch, weight)
    dx, dgain = rms_norm_backward(dy, residual, weight, rstd, dresidual)
    eager, exact = (
        values_and_gradients(reference, (residual, weight), (dy,), wide)[1:] for wide in (x.dtype, torch.float64)
    )
    check("dx", dx, eager[0] + dresidual, exact[0] + dresidual)
    check("dgain", dgain, eager[1], exact[1])


@pytest.mark.parametrize("d", [1024, 1600, 4096, MAX_BLOCK_D, 2 * MAX_BLOCK_D])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float32)],
)
def test_repeats_give_the_same_bits(d: int, device: str, dtype: torch.dtype) -> None:
    x, branch, dy, dresidual, weight = make((2049, d), device, dtype)
    residual, rstd = check_both_forms(x, branch, weight)
    first, *others = (rms_norm_backward(dy, residual, weight, rstd, dresidual) for _ in range(6))
    assert all(all(map(torch.equal, first, found)) for found in others)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_rounds_where_the_reference_does(device: str, dtype: torch.dtype) -> None:
    """x + branch, and x * rstd before the gain: of equal statistics, to the bit."""
    x, branch, _, _, weight = make((20, 500), device, dtype)
    residual, y, _ = add_rms_norm_forward(x, branch, weight, EPS)
    expected = reference(x + branch, weight)
    rounded_late = reference((x + branch).float(), weight.float()).to(dtype)
    assert torch.equal(residual, x + branch)
    assert (y == expected).double().mean() > 0.99  # one bit of rstd may differ, and turn a few
    assert (rounded_late == expected).double().mean() < 0.9


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_strides_and_expanded_gradients(device: str, dtype: torch.dtype) -> None:
    x, branch, dy, _, weight = make((6, 40), device, dtype)
    expected = values_and_gradients(lambda *leaves: add_rms_norm(*leaves, EPS), (x, branch, weight), (dy, dy), dtype)
    leaves = [x.t().contiguous().t(), torch.cat((x, branch), 1)[:, 40:], torch.stack((weight, weight), 1)[:, 0]]
    assert not any(leaf.is_contiguous() for leaf in leaves)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = add_rms_norm(*leaves, EPS)
    found = torch.autograd.grad(out, leaves, [dy.t().contiguous().t()] * 2)
    assert all(torch.equal(a, b) for a, b in zip((*out, *found), expected, strict=True))
    rstd, ones = rms_norm_forward(x, weight, EPS)[1], torch.ones_like(dy)
    rms_norm(x.requires_grad_(), weight, EPS).sum().backward()
    assert torch.equal(x.grad, rms_norm_backward(ones, x.detach(), weight, rstd)[0])
    residual, y = add_rms_norm(x, branch, weight, EPS)  # of which one result is used
    assert torch.equal(torch.autograd.grad(residual, x, dy, retain_graph=True)[0], dy)
    rstd = rms_norm_forward(residual.detach(), weight, EPS)[1]
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], rms_norm_backward(dy, residual.detach(), weight, rstd)[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rows_that_do_not_exist_add_nothing_without_eps(device: str, dtype: torch.dtype) -> None:
    x, _, dy, _, weight = make((3, 40), device, dtype)
    assert rms_norm_backward(dy, x, weight, rms_norm_forward(x, weight, 0.0)[1])[1].isfinite().all()


def test_refusals() -> None:
    x, weight = torch.zeros(3, 4), torch.zeros(4)
    check_refused(
        (lambda: rms_norm(x, torch.zeros(5), EPS), r"weight \(5,\) .* x \(3, 4\)"),
        (lambda: add_rms_norm(x, weight, weight, EPS), r"branch \(4,\) does not match x \(3, 4\)"),
        (lambda: rms_norm(x, weight.half(), EPS), "x torch.float32 on cpu, weight torch.float16 on cpu"),
        (lambda: add_rms_norm(x, x.to("meta"), weight, EPS), "branch torch.float32 on meta"),
        (lambda: rms_norm(x.double(), weight.double(), EPS), "got torch.float64"),
    )
