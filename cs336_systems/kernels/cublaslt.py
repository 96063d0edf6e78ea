"""Matmuls through cuBLASLt's own API: its heuristic candidates, and fp8 matmuls that accumulate into a matrix.

    out = a b [+ addend], or scale_a scale_b a b [+ addend] for fp8 matrices

cuBLASLt proposes several kernels for a matmul, first the one that it expects to be fastest, which torch uses. Here all
of them can be run (``matmul.py`` measures them), and an fp8 matmul can be added to a matrix, for which torch has no
operation. The sum is rounded once; but if the addend is the result itself, the product is rounded before, too
(measured: the bits of two roundings, at three sizes on an H200).

Method. The library that torch has loaded is called through ctypes, as documented in "Using the cuBLASLt API",
docs.nvidia.com/cuda/cublas. cuBLASLt's matrices are column-major, so b^T a^T is computed. Kernels that need a workspace
are excluded, and with them split-K kernels.

Limits: bf16, fp16 and fp32 results with operands of the same dtype; bf16 and fp16 results of e4m3 and e5m2 operands
with one scale each, both contiguous along the reduction dimension (``b`` is then a transposed matrix). Rows begin at
multiples of 16 bytes.

    kernel = candidates(spec(out, a, b))[0]
    kernel(out, a, b)

Shape legend: a (M, K), b (K, N), out (M, N).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

MOST = 8
"""Candidates that are requested."""
ALIGNMENT_BYTES = 16
_COMPUTE_FP32, _FP32 = 68, 0
_DTYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
"""``cublasComputeType_t`` and ``cudaDataType_t`` of library_types.h."""
_TRANSPOSE_LEFT, _TRANSPOSE_RIGHT, _SCALE_LEFT, _SCALE_RIGHT, _FAST = 3, 4, 17, 18, 25
"""Members of ``cublasLtMatmulDescAttributes_t``."""
_MOST_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
"""Members of ``cublasLtMatmulPreferenceAttributes_t``, the latter of both operands, the addend and the result."""
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class _Candidate(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Spec:
    """All that the choice of a kernel may depend on.

    Attributes:
        shape: (M, N, K).
        strides: of out, a and b; each matrix has one stride of 1.
        dtypes: of out, a and b.
        aligned: whether all begin at multiples of ``ALIGNMENT_BYTES``.
        adds: whether an addend, with the strides and dtype of out, is added.
        fast: whether fp8 matmuls use fast accumulation, without promotion to wider sums.
    """

    shape: tuple[int, int, int]
    strides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    device: torch.device
    aligned: bool
    adds: bool
    fast: bool


def spec(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None = None, *, fast: bool = False) -> Spec:
    """Return the ``Spec`` of a matmul of these tensors."""
    (m, k), n = a.shape, b.shape[1]
    strides, dtypes = (out.stride(), a.stride(), b.stride()), (out.dtype, a.dtype, b.dtype)
    added = out if addend is None else addend
    assert (added.stride(), added.dtype) == (out.stride(), out.dtype), (added.stride(), added.dtype)
    aligned = not (out.data_ptr() | a.data_ptr() | b.data_ptr() | added.data_ptr()) % ALIGNMENT_BYTES
    return Spec((m, n, k), strides, dtypes, out.device, aligned, addend is not None, fast)  # type: ignore[arg-type]


def serves(asked: Spec) -> bool:
    """Whether dtypes and strides are within the limits above."""
    out, *operands = asked.dtypes
    quantized = operands[0].itemsize == 1
    if quantized:
        of_dtype = out in (torch.bfloat16, torch.float16) and all(d in _DTYPES and d.itemsize == 1 for d in operands)
        of_dtype = of_dtype and asked.strides[1][1] == 1 and asked.strides[2][0] == 1
    else:
        of_dtype = out in _DTYPES and operands == [out, out]
    rows = all(
        1 in stride and max(stride) * dtype.itemsize % ALIGNMENT_BYTES == 0
        for stride, dtype in zip(asked.strides, asked.dtypes, strict=True)
    )
    return asked.device.type == "cuda" and of_dtype and asked.aligned and rows and asked.strides[0][1] == 1


class Kernel:
    """One of cuBLASLt's kernels for a matmul: a call writes a b, or a b + addend, to out."""

    def __init__(self, handles: Sequence[ctypes.c_void_p], candidate: _Candidate, *, adds: bool) -> None:
        self._product, self._left, self._right, self._out = handles
        self._candidate, self._beta = candidate, ctypes.byref(_ONE if adds else _ZERO)

    def __call__(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        addend: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Launch on the current stream; the tensors must match the kernel's ``Spec``.

        Args:
            addend: may be ``out``.
            scales: fp32 of one element each, by which fp8 a and b are multiplied.

        Raises:
            RuntimeError: the library refuses.
        """
        library = _library()
        if scales is not None:
            for attribute, scale in zip((_SCALE_RIGHT, _SCALE_LEFT), scales, strict=True):
                _set(self._product, attribute, ctypes.c_void_p(scale.data_ptr()))
        added = ctypes.c_void_p((out if addend is None else addend).data_ptr())
        with torch.cuda.device_of(out):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = library.cublasLtMatmul(
                *(_handle(out.get_device()), self._product, ctypes.byref(_ONE)),
                *(ctypes.c_void_p(b.data_ptr()), self._left, ctypes.c_void_p(a.data_ptr()), self._right),
                *(self._beta, added, self._out, ctypes.c_void_p(out.data_ptr()), self._out),
                *(ctypes.byref(self._candidate.algorithm), None, ctypes.c_size_t(0), stream),
            )
        _check("cublasLtMatmul", status)


@lru_cache(maxsize=512)
def candidates(asked: Spec) -> tuple[Kernel, ...]:
    """At most ``MOST`` kernels that need no workspace, first the one that the library expects to be fastest.

    Raises:
        RuntimeError: the library returns an error.
        ValueError: the library has no kernel, or ``serves`` is False.
    """
    if not serves(asked):
        raise ValueError(f"cuBLASLt is not asked for {asked}")
    library, (m, n, k), (out, a, b) = _library(), asked.shape, asked.dtypes
    of_out, of_a, of_b = asked.strides
    product = _make("cublasLtMatmulDescCreate", _COMPUTE_FP32, _FP32)
    _set(product, _TRANSPOSE_LEFT, ctypes.c_int32(of_b[0] == 1))
    _set(product, _TRANSPOSE_RIGHT, ctypes.c_int32(of_a[0] == 1))
    if a.itemsize == 1:
        _set(product, _FAST, ctypes.c_int8(asked.fast))
        for attribute in (_SCALE_LEFT, _SCALE_RIGHT):  # a placeholder address, which each call replaces
            _set(product, attribute, ctypes.c_void_p(_somewhere(asked.device).data_ptr()))
    left = _layout(b, (k, n) if of_b[0] == 1 else (n, k), max(of_b))
    right = _layout(a, (m, k) if of_a[0] == 1 else (k, m), max(of_a))
    result = _layout(out, (n, m), max(of_out))
    preference = _make("cublasLtMatmulPreferenceCreate")
    _prefer(preference, _MOST_WORKSPACE, ctypes.c_uint64(0))
    for attribute in _ALIGNMENTS:
        _prefer(preference, attribute, ctypes.c_uint32(ALIGNMENT_BYTES))
    found, n_found = (_Candidate * MOST)(), ctypes.c_int()
    with torch.cuda.device(asked.device):
        status = library.cublasLtMatmulAlgoGetHeuristic(
            *(_handle(asked.device.index), product, left, right, result, result, preference),
            *(MOST, found, ctypes.byref(n_found)),
        )
    _check("cublasLtMatmulAlgoGetHeuristic", status)
    if not n_found.value:
        raise ValueError(f"cuBLASLt has no kernel without a workspace for {asked}")
    handles = product, left, right, result
    return tuple(Kernel(handles, found[i], adds=asked.adds) for i in range(n_found.value))


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


@cache
def _handle(device: int | None) -> ctypes.c_void_p:
    return _make("cublasLtCreate")


@cache
def _somewhere(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _check(function: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{function} returned status {status}")


def _make(function: str, *arguments: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _check(function, getattr(_library(), function)(ctypes.byref(made), *arguments))
    return made


def _layout(dtype: torch.dtype, shape: tuple[int, int], stride: int) -> ctypes.c_void_p:
    rows, columns = (ctypes.c_uint64(n) for n in shape)
    layout = ctypes.c_void_p()
    status = _library().cublasLtMatrixLayoutCreate(
        ctypes.byref(layout), _DTYPES[dtype], rows, columns, ctypes.c_int64(stride)
    )
    _check("cublasLtMatrixLayoutCreate", status)
    return layout


_Value = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int8 | ctypes.c_uint64 | ctypes.c_uint32


def _set(product: ctypes.c_void_p, attribute: int, value: _Value) -> None:
    _call_setter("cublasLtMatmulDescSetAttribute", product, attribute, value)


def _prefer(preference: ctypes.c_void_p, attribute: int, value: _Value) -> None:
    _call_setter("cublasLtMatmulPreferenceSetAttribute", preference, attribute, value)


def _call_setter(function: str, of: ctypes.c_void_p, attribute: int, value: _Value) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _check(function, getattr(_library(), function)(of, attribute, ctypes.byref(value), size))
