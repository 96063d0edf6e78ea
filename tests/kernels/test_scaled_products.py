"""Products in fp8 that add to a matrix: against fp64 and the pair of kernels, and what is refused."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import scaled_products
from cs336_systems.kernels.scaled_products import add_scaled_product_
from tests.blocks.test_quantized_kernels import on_a_gpu_with_fp8, sums_may_lose
from tests.kernels.against_fp64 import random

M, N, K = 384, 272, 1280
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def make(device: str, of_a: torch.dtype = E4M3, of_b: torch.dtype = E4M3, of_c: torch.dtype = torch.bfloat16):
    """c (M, N), a (M, K), b (N, K) and both scales."""
    a, b = (random(shape, device, torch.float32, seed) for seed, shape in enumerate(((M, K), (N, K))))
    scales = (torch.tensor(scale, device=device) for scale in (0.037, 1.9))
    return 50 * random((M, N), device, of_c, 2), a.to(of_a), b.to(of_b), *scales


def exact_sum(c: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return c.double() + a.double() @ b.double().T * scale_a.double() * scale_b.double()


@pytest.mark.gpu
@on_a_gpu_with_fp8
@pytest.mark.parametrize("of_c", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("of_a", "of_b"), [(E4M3, E4M3), (E5M2, E4M3)])
def test_it_adds_and_rounds_once(of_a: torch.dtype, of_b: torch.dtype, of_c: torch.dtype) -> None:
    c, a, b, scale_a, scale_b = make("cuda", of_a, of_b, of_c)
    exact = exact_sum(c, a, b, scale_a, scale_b)
    lost = sums_may_lose(a.double(), b.double(), 128) * scale_a.double() * scale_b.double()
    apart = c + torch._scaled_mm(a, b.T, scale_a, scale_b, out_dtype=torch.bfloat16)
    got = c.clone()
    add_scaled_product_(got, a, b, scale_a, scale_b)
    error = (got.double() - exact).abs()
    assert (error <= torch.finfo(of_c).eps * exact.abs() + 1.01 * lost).all()
    assert error.mean() < (apart.double() - exact).abs().mean()


@pytest.mark.gpu
@on_a_gpu_with_fp8
def test_bits_are_the_same_each_time_and_in_a_graph() -> None:
    c, *operands = make("cuda")
    results = [c.clone() for _ in range(4)]
    for result in results[:3]:
        add_scaled_product_(result, *operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_scaled_product_(results[3], *operands)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], c)


@pytest.mark.gpu
@on_a_gpu_with_fp8
@pytest.mark.parametrize("shifted", ["c", "a", "b"])
def test_matrices_that_begin_16_bytes_into_an_aligned_block(shifted: str) -> None:
    """As parts of flat memory do."""
    tensors = dict(zip(("c", "a", "b", "scale_a", "scale_b"), make("cuda"), strict=True))
    whole = tensors[shifted]
    memory = torch.empty(whole.numel() + 16 // whole.element_size(), dtype=whole.dtype, device="cuda")
    tensors[shifted] = memory[16 // whole.element_size() :].view_as(whole).copy_(whole)
    assert scaled_products._alignment(tensors[shifted]) == 16
    exact = exact_sum(**tensors)
    add_scaled_product_(**tensors)
    assert (tensors["c"].double() - exact).abs().max() < 1 + exact.abs().max() / 256


@pytest.mark.gpu
@on_a_gpu_with_fp8
def test_it_runs_on_the_current_stream() -> None:
    c, *operands = make("cuda")
    expected = c.clone()
    add_scaled_product_(expected, *operands)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        c.zero_()
        add_scaled_product_(c, *operands)
    stream.synchronize()
    assert (c.double() - exact_sum(torch.zeros_like(c), *operands)).abs().max() < 1
    assert not torch.equal(c, expected)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({}, "needs tensors of one CUDA device, got c on cpu, a on cpu"),
        ({"a": torch.zeros(M, K)}, "a and b must be fp8 and c bf16, fp16 or fp32, got torch.float32"),
        ({"a": torch.zeros(M, K, dtype=E5M2), "b": torch.zeros(N, K, dtype=E5M2)}, "but not e5m2 by e5m2"),
        ({"scale_a": torch.ones(M, 1)}, r"scales must be one fp32 each, got torch.float32 \(384, 1\)"),
        ({"c": torch.zeros(N, M, dtype=torch.bfloat16)}, r"do not fit, got \[\(272, 384\)"),
        ({"c": torch.zeros(M, 8), "b": torch.zeros(8, K, dtype=E4M3)}, "multiples of 16, got 1280 and 8"),
        ({"c": torch.zeros(N, M).T}, "must be contiguous and begin at multiples of 16 bytes"),
        ({"scale_b": torch.ones(8)[1]}, "scales must lie at multiples of 16 bytes"),
    ],
)
def test_what_it_cannot_multiply_is_told(fault: dict[str, Tensor], message: str) -> None:
    tensors = dict(zip(("c", "a", "b", "scale_a", "scale_b"), make("cpu"), strict=True)) | fault
    with pytest.raises(ValueError, match=message):
        add_scaled_product_(**tensors)


def test_a_plan_is_made_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device may be the current one, and cuBLASLt makes its handle for that which is."""
    current: list[torch.device] = []

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    @contextmanager
    def description(*addresses: int) -> Iterator[None]:
        yield

    def plan(*arguments: object) -> None:
        raise RuntimeError(f"planned on {current}")

    c, a, b, *scales = make("cpu")
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(scaled_products, "_description", description)
    monkeypatch.setattr(scaled_products, "_checked", lambda *tensors: (a.shape, b.shape))
    monkeypatch.setattr(scaled_products, "_plan", plan)
    with pytest.raises(RuntimeError, match=r"planned on \[device\(type='cpu'\)\]"):
        add_scaled_product_(c, a, b, *scales)


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no cuBLASLt")
def test_the_library_reads_what_is_described() -> None:
    """Numbers of attributes and sizes of their values, without a GPU."""
    library, written = scaled_products._library(), ctypes.c_size_t()
    library.cublasLtMatmulDescGetAttribute.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
        *(ctypes.c_size_t, ctypes.c_void_p),
    )
    with scaled_products._description(64, 128) as description:
        for attribute, value, expected in (
            (scaled_products._TRANSPOSE_A, ctypes.c_int32(), 1),
            (scaled_products._SCALE_OF_A, ctypes.c_uint64(), 64),
            (scaled_products._SCALE_OF_B, ctypes.c_uint64(), 128),
        ):
            asked = ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)
            assert library.cublasLtMatmulDescGetAttribute(description, attribute, *asked) == 0
            assert value.value == expected
    library.cublasLtMatmulPreferenceGetAttribute.argtypes = library.cublasLtMatmulDescGetAttribute.argtypes
    with scaled_products._preference((16, 32, 64, 128)) as preference:
        for attribute, value, expected in (
            (scaled_products._MOST_WORKSPACE, ctypes.c_uint64(), scaled_products.WORKSPACE_BYTES),
            *((each, ctypes.c_uint32(), 16 << i) for i, each in enumerate(scaled_products._LEAST_ALIGNMENTS)),
        ):
            asked = ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)
            assert library.cublasLtMatmulPreferenceGetAttribute(preference, attribute, *asked) == 0
            assert value.value == expected
    with pytest.raises(RuntimeError, match="cublasLtMatmulDescSetAttribute returned status 7"):
        scaled_products._set("MatmulDesc", None, scaled_products._TRANSPOSE_A, ctypes.c_int32(1))
    layout = scaled_products._layout(torch.bfloat16, 256, 128)
    assert library.cublasLtMatrixLayoutDestroy(layout) == 0
