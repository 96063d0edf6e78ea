"""Products by cuBLASLt's candidates: the bits of torch's, sums of fp8 products against fp64, and what is chosen."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import matmul
from cs336_systems.kernels.cublaslt import Spec, candidates, serves, spec
from cs336_systems.kernels.matmul import Asked, choose, multiply_, multiply_scaled_
from tests.kernels.against_fp64 import random

M, N, K = 640, 384, 256


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(matmul, "_chosen", {})
    yield


def stored(shape: tuple[int, int], dtype: torch.dtype, *, transposed: bool, device: str = "cuda") -> Tensor:
    """Random numbers; ``transposed``, columns are contiguous."""
    return random(shape[::-1], device, dtype).T if transposed else random(shape, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_candidates_have_torchs_bits(dtype: torch.dtype, transposed: tuple[bool, bool]) -> None:
    """The first one at least, with and without an addend, in whole matrices and in rows that lie apart."""
    a, b = stored((M, K), dtype, transposed=transposed[0]), stored((K, N), dtype, transposed=transposed[1])
    for width in (N, N + 64):
        out = torch.empty(M, width, device="cuda", dtype=dtype)[:, :N]
        addend = random((M, N), "cuda", dtype, 7)
        for adds in (False, True):
            expected = torch.addmm(addend, a, b) if adds else a @ b
            found = []
            for kernel in candidates(spec(out, a, b, out if adds else None)):
                out.copy_(addend)
                kernel(out, a, b, out if adds else None)
                assert (out - expected).abs().max() <= 0.01 * expected.abs().max()
                found.append(torch.equal(out, expected))
            assert found[0]


@pytest.mark.gpu
def test_fp8_products_are_added_and_rounded_once_unless_in_place() -> None:
    a, b = (random((rows, K), "cuda", torch.bfloat16, seed).to(torch.float8_e4m3fn) for seed, rows in enumerate((M, N)))
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(0.25, device="cuda")
    before = random((M, N), "cuda", torch.bfloat16, 3)
    out = torch.empty_like(before)
    multiply_scaled_(out, a, b.T, scales, before)
    product = (a.double() @ b.double().T) / 8
    exact = before.double() + product
    lost = 2**-10 * (a.double().abs() @ b.double().abs().T) / 8  # 13 bits of each of K / 32 sums
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + lost).all()
    product_alone, in_place = torch.empty_like(before), before.clone()
    multiply_scaled_(product_alone, a, b.T, scales)
    multiply_scaled_(in_place, a, b.T, scales, in_place)
    assert torch.equal(in_place, before + product_alone)
    apart = torch.empty(M * N + 1, device="cuda", dtype=torch.bfloat16)[1:].view(M, N).copy_(before)  # not aligned
    multiply_scaled_(apart, a, b.T, scales, apart)
    assert ((apart.double() - exact).abs() <= 2**-7 * (exact.abs() + product.abs()) + lost).all()


@pytest.mark.gpu
def test_what_is_chosen_is_used_and_changes_no_bit() -> None:
    a, b = stored((M, K), torch.bfloat16, transposed=False), stored((K, N), torch.bfloat16, transposed=True)
    out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    choose([Asked(torch.empty_like(out), torch.empty_like(a), torch.empty_like(b))])
    assert spec(out, a, b) in matmul._chosen
    multiply_(out, a, b)
    assert torch.equal(out, a @ b)
    called = []
    matmul._chosen[spec(out, a, b)] = lambda *tensors: called.append(tensors)
    multiply_(out, a, b)
    multiply_(out, a, b, out)
    assert len(called) == 1


@pytest.mark.parametrize(("wrong", "change"), [("dtype", torch.float64), ("rows", 4), ("place", 1)])
def test_other_tensors_are_left_to_torch(wrong: str, change: torch.dtype | int) -> None:
    def made(shape: tuple[int, int]) -> Tensor:
        n = shape[0] * shape[1] + 64
        return torch.empty(n, dtype=torch.bfloat16)[:-64].view(shape)

    out, a, b = made((M, N)), made((M, K)), made((K, N))
    on_gpu = torch.device("cuda", 0)
    good = spec(out, a, b)
    assert not serves(good)
    assert serves(Spec(**{**vars(good), "device": on_gpu, "aligned": True}))
    if wrong == "dtype":
        bad = {"dtypes": (change,) * 3}
    elif wrong == "rows":
        bad = {"strides": ((N + 4, 1), *good.strides[1:])}
    else:
        bad = {"aligned": False}
    assert not serves(Spec(**{**vars(good), "device": on_gpu, "aligned": True, **bad}))
    x = torch.randn(3, 5)
    out = torch.empty(3, 4)
    multiply_(out, x, torch.ones(5, 4))
    assert torch.equal(out, x @ torch.ones(5, 4))
    multiply_(out, x, torch.ones(5, 4), out.clone())
    assert torch.allclose(out, 2 * x @ torch.ones(5, 4))
