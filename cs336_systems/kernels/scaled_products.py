"""A matrix product of fp8 operands that adds to a matrix, as gradients of weights do over micro-batches.

    C = C + scale_a scale_b a b^T, summed in fp32 and rounded once

``torch._scaled_mm`` adds to nothing: its result is written, read again and added by a second kernel, which moves 8
bytes for each element of bf16 where 4 would do. cuBLASLt, which torch calls, can add (``beta`` = 1); so it is called
here through ctypes, with the library that torch has loaded, and the algorithm that its heuristic names first.
``benchmark_fp8.py`` compares the two ways; training adds by a second kernel.

Method of the sum: without fast accumulation, as torch's default; ``blocks/quantized.py`` says how Hopper adds up.

    add_scaled_product_(C, a, b, scale_a, scale_b)      # C (M, N), a (M, K), b (N, K), scales () of fp32

Source: cuBLAS library documentation, "Using the cuBLASLt API", ``cublasLtMatmul``.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cs336_systems.operators.registration import operator

WORKSPACE_BYTES = 32 << 20
"""What torch gives cuBLASLt on Hopper, taken from torch's allocator for the time of a call."""

_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.bfloat16: 14, torch.float16: 2, torch.float32: 0}
"""``cudaDataType``."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SUM_IN_FP32 = 68  # CUBLAS_COMPUTE_32F
_FP32 = _TYPES[torch.float32]
_TRANSPOSE_A, _SCALE_OF_A, _SCALE_OF_B = 3, 17, 18  # CUBLASLT_MATMUL_DESC_...
_MOST_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_LEAST_ALIGNMENTS = (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{A, B, C, D}_BYTES
_BEST_ALIGNMENT = 256
"""Bytes to which cuBLASLt takes matrices to be aligned, unless it is told."""
_ALIGNMENT = 16
"""Bytes at which rows, matrices and scales begin, which fp8 products ask for."""


class _Found(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> Any:
    """The library of torch's own CUDA version."""
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cublasLtMatrixLayoutCreate.argtypes = (pointer, ctypes.c_int, *[ctypes.c_uint64] * 2, ctypes.c_int64)
    for name in ("cublasLtMatmulDescSetAttribute", "cublasLtMatmulPreferenceSetAttribute"):
        getattr(library, name).argtypes = (pointer, ctypes.c_int, pointer, size)
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = (*[pointer] * 7, ctypes.c_int, pointer, pointer)
    library.cublasLtMatmul.argtypes = (*[pointer] * 14, size, pointer)
    for name in ("MatmulDescDestroy", "MatrixLayoutDestroy", "MatmulPreferenceDestroy"):
        getattr(library, f"cublasLt{name}").argtypes = (pointer,)
    return library


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), f"cublasLt{name}")(*arguments):
        raise RuntimeError(f"cublasLt{name} returned status {status} of cublasStatus_t")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """cuBLASLt's of one device, which must be the current one."""
    handle = ctypes.c_void_p()
    _call("Create", ctypes.byref(handle))
    return handle


def _layout(dtype: torch.dtype, width: int, rows: int) -> ctypes.c_void_p:
    """Of a contiguous (rows, width) tensor, which cuBLASLt, by columns, sees transposed."""
    layout = ctypes.c_void_p()
    _call("MatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], width, rows, width)
    return layout


def _set(what: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(f"{what}SetAttribute", of, attribute, ctypes.byref(value), ctypes.sizeof(value))


@contextmanager
def _description(scale_of_a: int, scale_of_b: int) -> Iterator[ctypes.c_void_p]:
    """Of a product whose first operand is transposed, with the addresses of both scales."""
    description = ctypes.c_void_p()
    _call("MatmulDescCreate", ctypes.byref(description), _SUM_IN_FP32, _FP32)
    try:
        _set("MatmulDesc", description, _TRANSPOSE_A, ctypes.c_int32(1))
        _set("MatmulDesc", description, _SCALE_OF_A, ctypes.c_void_p(scale_of_a))
        _set("MatmulDesc", description, _SCALE_OF_B, ctypes.c_void_p(scale_of_b))
        yield description
    finally:
        _call("MatmulDescDestroy", description)


def _alignment(x: Tensor) -> int:
    """Of its memory in bytes: a power of two, at most what cuBLASLt makes a difference of."""
    return min(x.data_ptr() & -x.data_ptr(), _BEST_ALIGNMENT)


@contextmanager
def _preference(alignments: tuple[int, ...]) -> Iterator[ctypes.c_void_p]:
    """Of algorithms that the workspace is enough for, and matrices so aligned: as cuBLASLt's A, B, C and D."""
    preference = ctypes.c_void_p()
    _call("MatmulPreferenceCreate", ctypes.byref(preference))
    try:
        _set("MatmulPreference", preference, _MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        for attribute, alignment in zip(_LEAST_ALIGNMENTS, alignments, strict=True):
            _set("MatmulPreference", preference, attribute, ctypes.c_uint32(alignment))
        yield preference
    finally:
        _call("MatmulPreferenceDestroy", preference)


class _Plan:
    """Layouts and algorithm of products of one shape on the current device; kept for the life of the process."""

    def __init__(
        self,
        device: int,
        sizes: tuple[int, int, int],
        dtypes: tuple[torch.dtype, ...],
        alignments: tuple[int, int, int],
    ) -> None:
        (m, n, k), (of_c, of_a, of_b) = sizes, dtypes
        c_aligned, a_aligned, b_aligned = alignments
        self.first, self.second = _layout(of_b, k, n), _layout(of_a, k, m)
        self.result = _layout(of_c, n, m)
        found, n_found = _Found(), ctypes.c_int()
        with (
            _preference((b_aligned, a_aligned, c_aligned, c_aligned)) as preference,
            _description(_ALIGNMENT, _ALIGNMENT) as description,
        ):
            layouts = self.first, self.second, self.result, self.result
            asked = _handle(device), description, *layouts, preference, 1
            _call("MatmulAlgoGetHeuristic", *asked, ctypes.byref(found), ctypes.byref(n_found))
        if n_found.value == 0 or found.status:
            raise RuntimeError(f"cuBLASLt has no product of {of_a} {m} x {k} and {of_b} {n} x {k} that adds to {of_c}")
        self.algorithm, self.workspace_bytes = found.algorithm, found.workspace_bytes


_plan = cache(_Plan)


def _nothing(c: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    return None


@operator("add_scaled_product_", _nothing, mutates=("c",))
def add_scaled_product_(c: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    """c = c + scale_a scale_b a b^T, on the current stream.

    Args:
        c: (M, N), bf16, fp16 or fp32.
        a: (M, K), float8_e4m3fn or float8_e5m2; K and N multiples of 16.
        b: (N, K), likewise; at least one of the two in e4m3.
        scale_a: () of fp32; a times it is what was quantized.
        scale_b: likewise of b.

    Raises:
        ValueError: shapes, dtypes, strides or devices are others.
        RuntimeError: cuBLASLt has no such product, or refuses it.
    """
    (m, k), (n, _) = _checked(c, a, b, scale_a, scale_b)
    one = ctypes.byref(ctypes.c_float(1.0))
    with torch.cuda.device(c.device), _description(scale_b.data_ptr(), scale_a.data_ptr()) as description:
        dtypes, alignments = (c.dtype, a.dtype, b.dtype), (_alignment(c), _alignment(a), _alignment(b))
        plan = _plan(c.device.index, (m, n, k), dtypes, alignments)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=c.device)
        operands = one, b.data_ptr(), plan.first, a.data_ptr(), plan.second
        into = one, c.data_ptr(), plan.result, c.data_ptr(), plan.result, plan.algorithm
        scratch = workspace.data_ptr(), plan.workspace_bytes, torch.cuda.current_stream().cuda_stream
        _call("Matmul", _handle(c.device.index), description, *operands, *into, *scratch)


def _checked(c: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[torch.Size, torch.Size]:
    """Shapes of a and b, if cuBLASLt can multiply them."""
    if a.dtype not in _FP8 or b.dtype not in _FP8 or c.dtype not in _TYPES or c.dtype in _FP8:
        raise ValueError(f"a and b must be fp8 and c bf16, fp16 or fp32, got {a.dtype}, {b.dtype} and {c.dtype}")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("cuBLASLt multiplies e4m3 by either format, but not e5m2 by e5m2")
    if any(x.dtype != torch.float32 or x.numel() != 1 for x in (scale_a, scale_b)):
        raise ValueError(
            f"scales must be one fp32 each, got {scale_a.dtype} {tuple(scale_a.shape)} and "
            f"{scale_b.dtype} {tuple(scale_b.shape)}"
        )
    shapes = [tuple(x.shape) for x in (c, a, b)]
    if a.ndim != 2 or b.ndim != 2 or shapes[0] != (a.shape[0], b.shape[0]) or a.shape[1] != b.shape[1]:
        raise ValueError(f"c (M, N), a (M, K) and b (N, K) do not fit, got {shapes}")
    if a.shape[1] % _ALIGNMENT or b.shape[0] % _ALIGNMENT:
        raise ValueError(f"K and N must be multiples of {_ALIGNMENT}, got {a.shape[1]} and {b.shape[0]}")
    if any(not x.is_contiguous() or x.data_ptr() % _ALIGNMENT for x in (c, a, b)):
        raise ValueError(f"c, a and b must be contiguous and begin at multiples of {_ALIGNMENT} bytes")
    if any(x.data_ptr() % _ALIGNMENT for x in (scale_a, scale_b)):  # which cuBLAS refused (LOG.md)
        raise ValueError(f"scales must lie at multiples of {_ALIGNMENT} bytes")
    tensors = {"c": c, "a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    if not all(x.is_cuda and x.device == c.device for x in tensors.values()):
        got = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"an fp8 product that adds needs tensors of one CUDA device, got {got}")
    return a.shape, b.shape
