"""Matrices in parts quantized together: the bits of each whole quantized, whatever its parts; NaN, infinity; limits."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cs336_systems.kernels import quantize_parts
from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.quantize_reference import LARGEST, Part

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = (quantize_parts.PartsQuantizer, reference.PartsQuantizer)
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def in_parts(matrices: list[Tensor], cuts: list[list[int]], inverse_scales: Tensor) -> list[Part]:
    """Each matrix, (n,), cut into parts of these lengths; bytes that nobody has written are 255."""
    return [
        Part(x, torch.full(x.shape, 255, dtype=torch.uint8, device=x.device), number, inverse_scales[number])
        for number, (matrix, lengths) in enumerate(zip(matrices, cuts, strict=True))
        for x in matrix.split(lengths)
    ]


def check_same(matrices: list[Tensor], cuts: list[list[int]], fp8: torch.dtype, rounded_to: torch.dtype | None) -> None:
    """Both kinds against the definition of each whole, twice, and once more for other values."""
    for kind in KINDS:
        memory = torch.full((len(matrices), 4), torch.nan, device=DEVICE)
        parts = in_parts([matrix.clone() for matrix in matrices], cuts, memory[:, 0])
        quantizer = kind(parts, fp8, rounded_to)
        for factor in (1, 1, -3):
            for part in parts:
                part.x.mul_(factor)
            absmax = quantizer.absmax()
            quantizer.quantize_(absmax)
            for number in range(len(matrices)):
                own = [part for part in parts if part.matrix == number]
                whole = torch.cat([part.x for part in own]).to(rounded_to or matrices[0].dtype)
                scale, inverse = reference.scales(reference.absmax(whole), fp8)
                expected = reference.cast(whole, scale, fp8).view(torch.uint8)
                assert torch.equal(absmax[number], reference.absmax(whole))
                assert torch.equal(torch.cat([part.q for part in own]), expected)
                assert torch.equal(memory[number, 0], inverse)
        assert memory[:, 1:].isnan().all()


@settings(deadline=None, max_examples=6, derandomize=True)
@given(
    cuts=st.lists(st.lists(st.sampled_from([16, 48, 8208]), min_size=1, max_size=3), min_size=1, max_size=3),
    fp8=st.sampled_from(list(LARGEST)),
    dtypes=st.sampled_from([(FP32, None), (BF16, None), (FP32, BF16), (FP32, FP32)]),
    seed=st.integers(0, 3),
)
def test_the_bits_are_those_of_the_whole(cuts, fp8, dtypes, seed) -> None:
    dtype, rounded_to = dtypes
    generator = torch.Generator().manual_seed(seed)
    matrices = [
        torch.randn(sum(own), generator=generator).mul_(10.0**i).to(DEVICE, dtype) for i, own in enumerate(cuts)
    ]
    check_same(matrices, cuts, fp8, rounded_to)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_its_matrixs_alone(kind, value) -> None:
    matrices = [torch.ones(32, device=DEVICE, dtype=BF16) for _ in range(2)]
    matrices[1][31] = -value
    inverse = torch.zeros(2, device=DEVICE)
    parts = in_parts(matrices, [[32], [16, 16]], inverse)
    quantizer = kind(parts, E4M3)
    quantizer.quantize_(absmax := quantizer.absmax())
    assert absmax[0] == 1
    assert torch.equal(absmax[1:].view(torch.int32) & 1 << 31, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert not inverse[1].isfinite()
    assert inverse[0] == 1 / LARGEST[E4M3]
    assert parts[2].q.view(E4M3).float()[15].isnan()
    assert (parts[0].q.view(E4M3).float() == LARGEST[E4M3]).all()


def test_refusals() -> None:
    scale = torch.zeros((), device=DEVICE)

    def part(n: int = 32, dtype=BF16, matrix: int = 0, n_bytes: int = 32, first: int = 0, scale=scale) -> Part:
        x = torch.zeros(n + first, dtype=dtype, device=DEVICE)[first:]
        return Part(x, torch.zeros(n_bytes, dtype=torch.uint8, device=DEVICE), matrix, scale)

    cases = (
        ([part()], torch.int8, None, "quantization is to .*, not to torch.int8"),
        ([part(), part(matrix=2)], E4M3, None, r"from 0 without gaps, got \[0, 2\]"),
        ([part(0, n_bytes=0)], E4M3, None, r"part 0 has \(0,\)"),
        ([part(n_bytes=16)], E4M3, None, r"part 0 has \(32,\) torch.bfloat16, \(16,\)"),
        ([part(dtype=torch.float64)], E4M3, None, "got torch.float64, rounded to torch.float64"),
    )
    for kind in KINDS:
        for parts, fp8, rounded_to, said in cases:
            with pytest.raises(ValueError, match=said):
                kind(parts, fp8, rounded_to)
    for parts in ([part(24, n_bytes=24)], [part(first=1)]):
        with pytest.raises(ValueError, match=r"part 0 has \d+ elements, at 0x.*: 16 must divide all three"):
            quantize_parts.PartsQuantizer(parts, E4M3)
