"""Quantization to fp8: what the definition says, and the kernels to the bit of it, as it is and transposed.

Triton's interpreter converts to fp8 as PyTorch does (``interpreter.py``): the hardware's own way is tested on a GPU.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.quantize import quantize, quantize_blocks, transpose_bytes
from cs336_systems.kernels.quantize_reference import LARGEST, MIN_ABSMAX, Quantized
from tests.kernels.against_fp64 import INTERPRETED, PLACES, check_refused, random

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, BF16 = torch.float32, torch.bfloat16
AWKWARD = [((16, 16), FP32, E5M2), ((16, 272), BF16, E4M3), ((144, 48), FP32, E5M2)]
"""Less than a tile, and a little more than one of columns and of rows; the interpreter takes the one dtype."""
ON_CPU_AND_GPU = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


def check_same(found: Quantized, expected: Quantized) -> None:
    """Equal to the bit; of NaN only that it is one."""
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.shape == theirs.shape, name
            assert ours.dtype == theirs.dtype, name
            bits = [torch.where(x.isnan(), torch.nan, x).view(torch.int32) for x in (ours.float(), theirs.float())]
            assert torch.equal(*bits), name


def maxima(x: Tensor, per_row: bool) -> dict[str, Tensor]:
    if not per_row:
        return {"absmax": reference.absmax(x)}
    return dict(zip(("absmax", "absmax_t"), reference.row_and_column_absmax(x), strict=True))


def check_all_forms(x: Tensor, dtype: torch.dtype) -> None:
    """Every form of scaling, of both or one of q and q_t."""
    for rows, transposed in ((True, True), (True, False), (False, True)):
        wanted = {"rows": rows, "transposed": transposed}
        for per_row in (False, True):
            expected = reference.quantize(x, dtype=dtype, **maxima(x, per_row), **wanted)
            check_same(quantize(x, dtype=dtype, **maxima(x, per_row), **wanted), expected)
        for square in (False, True):
            expected = reference.quantize_blocks(x, dtype, square=square, **wanted)
            check_same(quantize_blocks(x, dtype, square=square, **wanted), expected)


@pytest.mark.parametrize(("shape", "dtype", "fp8"), AWKWARD, ids=str)
@pytest.mark.parametrize("device", ON_CPU_AND_GPU)
@pytest.mark.usefixtures("poisoned")
def test_as_defined(shape: tuple[int, int], dtype: torch.dtype, fp8: torch.dtype, device: str) -> None:
    for each in (dtype,) if device == "cpu" else (FP32, BF16, torch.float16):
        check_all_forms(random(shape, device, each), fp8)


@pytest.mark.parametrize(("fp8", "absmax"), [(E4M3, 1e-38), (E5M2, 3.7), (E4M3, 448.0)], ids=str)
@pytest.mark.parametrize("device", ON_CPU_AND_GPU)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # the interpreter's
def test_every_bf16_number_saturates_and_rounds_to_even(device: str, absmax: float, fp8: torch.dtype) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    x = bits.view(BF16).view(256, 256).to(device)
    maximum = torch.tensor(absmax, device=device)
    found = quantize(x, maximum, fp8, transposed=True)
    check_same(found, reference.quantize(x, maximum, fp8, transposed=True))
    assert found.q.float().abs().nan_to_num(0.0).max() == LARGEST[fp8]


@pytest.mark.parametrize("fp8", LARGEST, ids=str)
@pytest.mark.parametrize("device", ON_CPU_AND_GPU)
def test_what_the_definition_says(device: str, fp8: torch.dtype) -> None:
    """Close to x, at the end of the range where x is largest, ties to even, and the other way round transposed."""
    x = random((64, 48), device, FP32)
    q, q_t, inverse, inverse_t = reference.quantize(x, reference.absmax(x), fp8, transposed=True)
    assert q.float().abs().max() == LARGEST[fp8]
    assert torch.equal(q_t.float(), q.float().t())
    assert inverse == inverse_t == reference.absmax(x) / torch.full_like(inverse, LARGEST[fp8])
    spacing = torch.finfo(fp8).eps
    for quantized in (
        reference.quantize(x, reference.absmax(x), fp8),
        reference.quantize(x, reference.row_and_column_absmax(x)[0], fp8),
        reference.quantize_blocks(x, fp8),
        reference.quantize_blocks(x, fp8, square=True),
    ):
        error = (reference.dequantize(quantized.q, quantized.inverse_scale) - x).abs()
        least = torch.finfo(fp8).smallest_normal * spacing * quantized.inverse_scale.max()
        assert (error <= 0.51 * torch.maximum(spacing * x.abs(), least)).all()
    ties = torch.zeros(16, 16, device=device)
    ties[0, :4] = torch.tensor([1 + spacing / 2, 1 + 1.5 * spacing, -1 - spacing / 2, LARGEST[fp8]])
    found = reference.quantize(ties, reference.absmax(ties), fp8).q.float()
    assert found[0, :3].tolist() == [1, 1 + 2 * spacing, -1]


@pytest.mark.parametrize(
    ("quantizer", "fp8"), [("tensor", E4M3), ("row", E5M2), ("block", E4M3), ("square", E5M2)], ids=str
)
@pytest.mark.parametrize("device", ON_CPU_AND_GPU)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's
def test_zero_nan_and_infinity_are_seen(device: str, fp8: torch.dtype, quantizer: str) -> None:
    """Zero stays zero; a product with what is not finite holds no finite number where that is part of the scale."""
    for value in (0.0, float("nan"), float("inf"), -float("inf")):
        x = torch.zeros(144, 144, device=device) if value == 0 else random((144, 144), device, FP32)
        x[130, 5] = value
        arguments: dict[str, object] = {"transposed": True}
        if quantizer in ("tensor", "row"):
            arguments |= maxima(x, quantizer == "row")
            by = quantize, reference.quantize
        else:
            arguments |= {"square": quantizer == "square"}
            by = quantize_blocks, reference.quantize_blocks
        found, expected = (function(x, dtype=fp8, **arguments) for function in by)
        check_same(found, expected)
        for q, inverse, row in ((found.q, found.inverse_scale, 130), (found.q_t, found.inverse_scale_t, 5)):
            back = reference.dequantize(q, inverse)
            if value == 0:
                assert not q.float().any()
                assert (inverse == inverse.new_tensor(MIN_ABSMAX) / torch.full_like(inverse, LARGEST[fp8])).all()
            else:
                assert (back @ torch.ones(144, 3, device=device))[row].isnan().all()
                assert back.isnan().all() == (quantizer == "tensor")


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_strides_and_empty_tensors(device: str, dtype: torch.dtype) -> None:
    x = random((48, 32), device, dtype)
    check_all_forms(x.t(), E4M3)
    check_all_forms(random((48, 64), device, dtype)[:, 16:48], E5M2)
    for shape in ((0, 16), (32, 0)):
        q, q_t, *_ = quantize(torch.zeros(shape, device=device), torch.zeros((), device=device), E4M3, transposed=True)
        assert (q.shape, q_t.shape) == (shape, shape[::-1])


@pytest.mark.slow
@settings(deadline=None, max_examples=6, derandomize=True)
@given(n_rows=st.integers(0, 20), width=st.integers(0, 20), seed=st.integers(0, 3))
@pytest.mark.parametrize("device", ON_CPU_AND_GPU)
def test_bytes_are_transposed(device: str, n_rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (16 * n_rows, 16 * width), generator=generator).to(device, torch.uint8)
    for given_x in (x, x.t(), torch.cat((x, x), dim=1)[:, : 16 * width]):
        for transposed in (transpose_bytes(given_x.view(E4M3)), reference.transpose_bytes(given_x.view(E4M3))):
            assert transposed.dtype == E4M3
            assert transposed.is_contiguous()
            assert torch.equal(transposed.view(torch.uint8), given_x.t())


def test_refusals() -> None:
    x, absmax = torch.zeros(32, 16), torch.zeros(())
    for to in (quantize, reference.quantize):
        check_refused(
            (lambda to=to: to(x[:24], absmax, E4M3), r"got \(24, 16\)"),
            (lambda to=to: to(x, absmax, BF16), "not to torch.bfloat16"),
            (lambda to=to: to(x, absmax, E4M3, rows=False), "neither"),
            (lambda to=to: to(x, torch.zeros(1, 16), E4M3), r"got \(1, 16\) and None"),
            (lambda to=to: to(x, absmax.bfloat16(), E4M3), "got torch.bfloat16"),
        )
    check_refused(
        (lambda: transpose_bytes(torch.zeros(16, 24, dtype=torch.uint8)), r"got \(16, 24\)"),
        (lambda: transpose_bytes(torch.zeros(16, 16, dtype=BF16)), "got torch.bfloat16"),
        (lambda: quantize(x.double(), absmax, E4M3), "got torch.float64"),
    )
