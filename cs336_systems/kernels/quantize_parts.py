"""Quantization to fp8 of any number of sharded matrices in two launches; definition: ``quantize_reference.py``.

    absmax        = max |x| of each matrix, over all of its parts
    q             = fp8(x M / max(absmax, 1e-10))      inverse_scale = max(absmax, 1e-10) / M

A rank under FSDP holds rows of every matrix of every block, each in separate memory; those of q, k and v are parts of
one matrix. Between the two launches, ranks reduce the absmax. Separate launches for each part took 45 operations per
block, and in a recording the host launched them too late (profiles/log/2026-11-25.md).

Method: a program processes a chunk of one part (``tensor_table.py``); each thread loads 16 bytes at a time.

Traffic per bf16 element: reads 2 bytes twice, and writes 1.

Limits: fp32, bf16 and fp16 to e4m3 and e5m2; parts begin at multiples of 16 bytes and have multiples of 16 elements.

    parts = [Part(x, q, 0, a), Part(y, r, 0, a), Part(z, s, 1, b)]
    quantizer = PartsQuantizer(parts, torch.float8_e4m3fn)
    absmax = quantizer.absmax()          # (2,)
    quantizer.quantize_(absmax)          # fills q, r and s, a and b
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.config import FP8_QUANTUM
from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.absmax import magnitude_bits, raise_absmax
from cs336_systems.kernels.assembly import fp8_bytes, rounded
from cs336_systems.kernels.launching import check_runnable, launch
from cs336_systems.kernels.quantize import format_of, scales_of
from cs336_systems.kernels.tensor_table import TensorTable, is_aligned

CHUNK, WARPS = 8192, 8
"""Elements per program: 32 per thread."""
ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

COLUMNS = tl.constexpr(6)
X = tl.constexpr(2)
Q = tl.constexpr(3)
MATRIX = tl.constexpr(4)
INVERSE_SCALE = tl.constexpr(5)


@triton.jit
def chunk_of(rows, owners, CHUNK: tl.constexpr):
    """(This program's row of the table, the start of its chunk within the part, the part's number of elements)."""
    program = tl.program_id(0)
    row = rows + tl.load(owners + program) * COLUMNS
    start = (program - tl.load(row + 1)) * CHUNK
    return row, start, tl.multiple_of(tl.minimum(tl.load(row) - start, CHUNK).to(tl.int32), 16)


@triton.jit
def load_chunk(row, start, n, ELEMENT: tl.constexpr, ROUNDED: tl.constexpr, CHUNK: tl.constexpr):
    """The elements of a chunk, rounded to ROUNDED, in fp32."""
    x = tl.multiple_of(tl.load(row + X).to(tl.pointer_type(ELEMENT)), 16)
    at = tl.arange(0, CHUNK)
    block = tl.load(x + start + at, mask=at < n, other=0.0).to(tl.float32)
    if ROUNDED != ELEMENT:
        block = rounded(block, ROUNDED)
    return block


@triton.jit
def parts_absmax_kernel(rows, owners, absmax, ELEMENT: tl.constexpr, ROUNDED: tl.constexpr, CHUNK: tl.constexpr):
    """Raise absmax (n_matrices,), which the caller has zeroed, to the largest magnitudes."""
    row, start, n = chunk_of(rows, owners, CHUNK)
    bits = magnitude_bits(load_chunk(row, start, n, ELEMENT, ROUNDED, CHUNK))
    raise_absmax(absmax + tl.load(row + MATRIX), bits, tl.float32)


@triton.jit
def quantize_parts_kernel(
    rows, owners, absmax,
    ELEMENT: tl.constexpr, ROUNDED: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the bytes and inverse scales to the addresses in the table."""
    row, start, n = chunk_of(rows, owners, CHUNK)
    scale, inverse = scales_of(tl.load(absmax + tl.load(row + MATRIX)), LARGEST)
    # All parts of a matrix store the same value.
    tl.store(tl.load(row + INVERSE_SCALE).to(tl.pointer_type(tl.float32)), inverse, mask=start == 0)
    q = tl.multiple_of(tl.load(row + Q).to(tl.pointer_type(tl.uint8)), 16)
    at = tl.arange(0, CHUNK)
    tl.store(q + start + at, fp8_bytes(load_chunk(row, start, n, ELEMENT, ROUNDED, CHUNK) * scale, DTYPE), mask=at < n)


class PartsQuantizer(reference.PartsQuantizer):
    """``quantize_reference.PartsQuantizer`` by two kernels. It stores addresses, so parts must keep their memory.

    Raises:
        ValueError: as there, a part is outside the limits above, or there is no CUDA device.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Tensor, Tensor, int, Tensor]],
        dtype: torch.dtype,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        super().__init__(parts, dtype, rounded_to)
        element, self._device = self._parts[0].x.dtype, self._parts[0].x.device
        check_runnable(quantize_parts_kernel, self._parts[0].x)
        for i, (x, q, *_) in enumerate(self._parts):
            if x.numel() % FP8_QUANTUM or not is_aligned(x, q):
                where = ", ".join(f"{each.data_ptr():#x}" for each in (x, q))
                raise ValueError(f"part {i} has {x.numel()} elements, at {where}: {FP8_QUANTUM} must divide all three")
        self._table = TensorTable(CHUNK)
        self._rows = [
            (part.x.numel(), part.x.data_ptr(), part.q.data_ptr(), part.matrix, part.inverse_scale.data_ptr())
            for part in self._parts
        ]
        self._elements = {"ELEMENT": ELEMENTS[element], "ROUNDED": ELEMENTS[self._rounded_to], "CHUNK": CHUNK}
        self._format = format_of(dtype)

    def absmax(self) -> Tensor:
        absmax = torch.zeros(self._n_matrices, dtype=torch.float32, device=self._device)
        self._launch(parts_absmax_kernel, absmax)
        return absmax

    def quantize_(self, absmax: Tensor) -> None:
        self._launch(quantize_parts_kernel, absmax, **self._format)

    def _launch(self, kernel, absmax: Tensor, **constants) -> None:
        with torch.cuda.device_of(absmax):  # Triton launches on the current device, which may be another
            self._table.describe(self._rows, self._device)
            arguments = self._table.rows, self._table.owners, absmax
            launch(kernel, (self._table.n_chunks,), *arguments, **self._elements, **constants, num_warps=WARPS)
