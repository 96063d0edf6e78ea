"""The operators pass torch's checks, trace without a graph break, and refuse tensors where Triton does not run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import absmax, quantize, rms_norm, rotary, swiglu
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_op
from cs336_systems.kernels.quantize_parts import PartsQuantizer
from cs336_systems.kernels.rms_norm_quantize import add_rms_norm_absmax, rms_norm_absmax, rms_norm_quantize_op
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize_op
from tests.kernels.against_fp64 import PLACES, check_refused, random

E4M3, E5M2, EPS = torch.float8_e4m3fn, torch.float8_e5m2, 1e-5


def calls(device: str, dtype: torch.dtype) -> list[tuple[Callable, tuple[object, ...]]]:
    """Each operator with arguments, with and without those that may be missing."""
    x, y, gate_up, gain = (random(shape, device, dtype) for shape in ((32, 16), (32, 16), (32, 32), (16,)))
    slot, one, rstd = (torch.full(shape, 1.0, device=device) for shape in ((), (), (32,)))
    angles, slopes = torch.ones(32, 4, device=device), torch.ones(4, 1, device=device)
    targets = torch.arange(32, device=device)
    rows, columns = absmax.row_and_column_absmax(x)
    strided = x.t().contiguous().t()
    return [
        (absmax.absmax, (x,)),
        (absmax.row_and_column_absmax, (x,)),
        (rms_norm.rms_norm_forward, (x, gain, EPS, slot)),
        (rms_norm.add_rms_norm_forward, (strided, y, gain, EPS, slot)),
        (rms_norm.rms_norm_backward, (y, x, gain, rstd, y)),
        (rms_norm.rms_norm_backward, (y, x, gain, None, None, EPS, slot)),
        (rms_norm_absmax, (x, gain, EPS, slot)),
        (add_rms_norm_absmax, (x, y, gain, EPS, slot)),
        (rms_norm_quantize_op, (x, gain, rstd, one, E4M3, False, True)),
        (swiglu.forward_op, (gate_up, slot, slopes)),
        (swiglu.backward_op, (x, gate_up)),
        (swiglu.backward_in_place_op, (x.clone(), gate_up.clone(), True, slot)),
        (swiglu_backward_quantize_op, (x, gate_up, slopes, slot, E4M3, True, one, E5M2)),
        (swiglu_backward_quantize_op, (x, gate_up, slopes, slot, E4M3, False, None, E5M2)),
        (rotary.rotate_, (gate_up.clone(), angles, angles, 2, 1, True, slot)),
        (quantize.quantize_op, (x, one, None, E4M3, True, True)),
        (quantize.quantize_op, (x, rows, columns, E5M2, False, True)),
        *((quantize.quantize_blocks_op, (x, E4M3, square, True, True)) for square in (False, True)),
        (quantize.transpose_bytes, (x.to(E4M3).view(torch.uint8),)),
        (linear_cross_entropy_op, (x, y, targets, None, torch.zeros_like(y), True, True, -100, 0.1, 4)),
        (linear_cross_entropy_op, (x, y, targets, one, None, False, False, -100, 0.0, 4)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_operators_pass_opcheck(device: str, dtype: torch.dtype) -> None:
    for operator, arguments in calls(device, dtype):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_compiles_without_graph_breaks(device: str, dtype: torch.dtype) -> None:
    x, branch, gain, weight = (random(shape, device, dtype) for shape in ((2, 5, 32), (2, 5, 32), (32,), (40, 16)))
    targets, angles = torch.arange(10, device=device).view(2, 5), torch.ones(5, 4, device=device)
    qkv = random((2, 5, 32), device, dtype)

    def function(x: Tensor, branch: Tensor, gain: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        residual, y = rms_norm.add_rms_norm(x, branch, gain, EPS)
        z = swiglu.swiglu(rms_norm.rms_norm(y, gain, EPS))
        rotated = 2 * qkv
        rotary.rotate_(rotated, angles, angles, 2, 1)
        return residual, 2 * linear_cross_entropy(z, weight, targets), rotated

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for each in (compiled, function):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, branch, gain, weight)]
        residual, loss, rotated = each(*leaves)
        results.append((residual, loss, rotated, *torch.autograd.grad(residual.sum() + loss, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_gpu_is_needed_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.JITFunction", object)  # the type of a kernel without the interpreter
    x, gain, targets = torch.zeros(16, 16), torch.zeros(16), torch.zeros(16, dtype=torch.int64)
    part = x, torch.zeros(16, 16, dtype=torch.uint8), 0, torch.zeros(())
    said = "needs a CUDA device .* on cpu"
    check_refused(
        (lambda: rms_norm.rms_norm(x, gain, EPS), said),
        (lambda: swiglu.swiglu(x), said),
        (lambda: rotary.rotate_(x, x[:, :2], x[:, :2], 2, 1), said),
        (lambda: quantize.quantize(x, torch.ones(()), E4M3), said),
        (lambda: quantize.quantize_blocks(x, E4M3), said),
        (lambda: PartsQuantizer([part], E4M3), said),
        (lambda: linear_cross_entropy(x, x, targets), said),
    )
