"""Quantization to fp8 in plain PyTorch on any device: the definition that the kernels match bit for bit.

M is the format's largest number (448 for e4m3, 57,344 for e5m2), absmax is over the elements that share a scale:

    clamped       = max(absmax, 1e-10)
    q             = x (M / clamped)    quotient and product in fp32, each rounded to nearest, ties to even; clamped to
                                       [-M, M]; then rounded to the format in the same way
    inverse_scale = clamped / M        fp32; q inverse_scale is about x: a matmul multiplies its result by it

The shape of absmax for x (T, D) determines which elements share a scale: () all of x; (T, 1) each row; (1, D) each
column. ``quantize_blocks`` computes its own absmax: per 1 x 128 along the reduction dimension, or per 128 x 128.

Values that are not finite stay visible, because a matmul with such a tensor gives results that are not finite:

* all zero: q is zero, inverse_scale 1e-10 / M; the result is zero.
* NaN in x: absmax is NaN; so are inverse_scale and all elements of q that share it.
* infinity in x, and no NaN: absmax and inverse_scale are infinite, q is NaN there and zero elsewhere; the result is
  NaN, as zero times infinity is.

If absmax is smaller than the largest element (taken from an earlier step, say), q saturates; if larger, range is lost.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.config import FP8_QUANTUM

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ELEMENTS = frozenset({torch.float32, torch.bfloat16, torch.float16})
MIN_ABSMAX = 1e-10
BLOCK = 128


class Quantized(NamedTuple):
    """x (T, D) in fp8; fields that were not requested are None.

    With one scale per tensor, ``inverse_scale_t`` is ``inverse_scale``. ``dequantize`` gives about x: q times its
    inverse scale, broadcast, or repeated over blocks.
    """

    q: Tensor | None
    """(T, D), row-major."""
    q_t: Tensor | None
    """(D, T), row-major: of the transposed x."""
    inverse_scale: Tensor | None
    """Inverse scale of q, fp32: (); or (T, 1); or for blocks (T, D / 128) or (T / 128, D / 128), rounded up."""
    inverse_scale_t: Tensor | None
    """Inverse scale of q_t, fp32: (); or (D, 1); or for blocks (D, T / 128) or (D / 128, T / 128), rounded up."""


class Part(NamedTuple):
    """A part of a matrix, all of whose parts share one scale."""

    x: Tensor
    """Contiguous, of any shape, not empty."""
    q: Tensor
    """Memory for its fp8 bytes: uint8, contiguous, with as many elements."""
    matrix: int
    """The matrix's number; numbers are consecutive from 0."""
    inverse_scale: Tensor
    """Memory for the matrix's inverse scale, () in fp32."""


def check_parts(parts: Sequence[Part], dtype: torch.dtype, rounded_to: torch.dtype) -> None:
    """Raises ValueError if there are no parts, or they cannot be quantized together."""
    check_format(dtype)
    numbers = sorted({part.matrix for part in parts})
    if numbers != list(range(len(numbers))):
        raise ValueError(f"matrices have numbers from 0 without gaps, got {numbers}")
    element, device = parts[0].x.dtype, parts[0].x.device
    if {element, rounded_to} - ELEMENTS:
        raise ValueError(f"elements are float32, bfloat16 or float16, got {element}, rounded to {rounded_to}")
    for i, (x, q, _, inverse_scale) in enumerate(parts):
        found = [(each.dtype, each.device) for each in (x, q, inverse_scale)]
        fits = found == [(element, device), (torch.uint8, device), (torch.float32, device)]
        fits = fits and 0 < x.numel() == q.numel() and x.is_contiguous() and q.is_contiguous()
        if not fits or inverse_scale.dim():
            shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in (x, q, inverse_scale))
            raise ValueError(
                f"a part has elements, contiguous, of one dtype and device, as many bytes and () in float32 for its "
                f"inverse scale; part {i} has {shapes}"
            )


def check_format(dtype: torch.dtype) -> None:
    """Raises ValueError unless ``dtype`` is an fp8 format."""
    if dtype not in LARGEST:
        raise ValueError(f"quantization is to {' or '.join(map(str, LARGEST))}, not to {dtype}")


def check(x: Tensor, dtype: torch.dtype, rows: bool, transposed: bool) -> None:
    """Raises ValueError, one sentence, if x cannot be quantized to ``dtype`` or no result is requested."""
    check_format(dtype)
    check_shape(x)
    if not (rows or transposed):
        raise ValueError("quantization gives rows, transposed or both, and neither was asked for")


def check_shape(x: Tensor) -> None:
    """Raises ValueError unless x is a matrix that fp8 matmuls support."""
    if x.dim() != 2 or x.shape[0] % FP8_QUANTUM or x.shape[1] % FP8_QUANTUM:
        raise ValueError(f"products in fp8 take matrices whose dimensions {FP8_QUANTUM} divides, got {tuple(x.shape)}")


def check_absmax(x: Tensor, absmax: Tensor, absmax_t: Tensor | None, transposed: bool) -> None:
    """Raises ValueError unless both are fp32 on the device of x, with the shapes of one form of scaling."""
    n_rows, width = x.shape
    shapes = tuple(absmax.shape), None if absmax_t is None else tuple(absmax_t.shape)
    if shapes not in [((), None), ((n_rows, 1), (1, width))] and (transposed or shapes != ((n_rows, 1), None)):
        raise ValueError(
            f"x {tuple(x.shape)} has one absmax (), or one for each row ({n_rows}, 1) and, to be transposed, absmax_t "
            f"(1, {width}); got {' and '.join(map(str, shapes))}"
        )
    for each in (absmax, absmax_t):
        if each is not None and (each.dtype != torch.float32 or each.device != x.device):
            raise ValueError(f"absmax must be float32 on {x.device}, got {each.dtype} on {each.device}")


def only(quantized: Quantized, rows: bool, transposed: bool) -> Quantized:
    """The requested fields; None for the others."""
    q, q_t, inverse, inverse_t = quantized
    return Quantized(
        q if rows else None,
        q_t if transposed else None,
        inverse if rows else None,
        inverse_t if transposed else None,
    )


def absmax(x: Tensor) -> Tensor:
    """The largest magnitude of x, () in fp32; 0 of an empty tensor."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def row_and_column_absmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each row (T, 1) and of each column (1, D) of x (T, D), fp32."""
    return x.abs().amax(dim=1, keepdim=True).float(), x.abs().amax(dim=0, keepdim=True).float()


def scales(absmax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, inverse_scale), fp32, with the shape of absmax."""
    clamped = absmax.clamp(min=MIN_ABSMAX)
    largest = torch.full_like(clamped, LARGEST[dtype])  # by a Python number, PyTorch would multiply by its reciprocal
    return largest / clamped, clamped / largest


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x scale, saturated, in ``dtype``; contiguous."""
    return (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).contiguous()


def quantize(
    x: Tensor,
    absmax: Tensor,
    dtype: torch.dtype,
    *,
    absmax_t: Tensor | None = None,
    rows: bool = True,
    transposed: bool = False,
) -> Quantized:
    """The definition of ``quantize.quantize``."""
    check(x, dtype, rows, transposed)
    check_absmax(x, absmax, absmax_t, transposed)
    absmax_t = absmax if absmax_t is None else absmax_t
    (scale, inverse), (scale_t, inverse_t) = (scales(each, dtype) for each in (absmax, absmax_t))
    q, q_t = cast(x, scale, dtype), cast(x, scale_t, dtype).t().contiguous()
    inverse_t = inverse_t.t().clone(memory_format=torch.contiguous_format)
    return only(Quantized(q, q_t, inverse, inverse_t), rows, transposed)


class PartsQuantizer:
    """Quantizes the same parts at every call, with their current values.

    Args:
        parts: each a ``Part``; at least one, all on one device and in one dtype; whole matrices, or rows of them.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rounded_to: fp32, bf16 or fp16, to which elements are rounded first; their own dtype by default.

    Raises:
        ValueError: a part does not match its bytes, its scale or the other parts.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Tensor, Tensor, int, Tensor]],
        dtype: torch.dtype,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        self._parts = [Part(*part) for part in parts]
        self._dtype, self._rounded_to = dtype, rounded_to or self._parts[0].x.dtype
        check_parts(self._parts, dtype, self._rounded_to)
        self._n_matrices = len({part.matrix for part in self._parts})

    def absmax(self) -> Tensor:
        """The largest magnitude of each matrix, (n_matrices,) in fp32; NaN, with a cleared sign, if it holds a NaN."""
        found: list[list[Tensor]] = [[] for _ in range(self._n_matrices)]
        for part in self._parts:
            found[part.matrix].append(absmax(part.x.to(self._rounded_to)))
        return torch.stack([torch.stack(own).amax() for own in found]).abs()  # a NaN has a sign

    def quantize_(self, absmax: Tensor) -> None:
        """Fill the parts' bytes and inverse scales, given absmax (n_matrices,) in fp32."""
        scale, inverse = scales(absmax, self._dtype)
        for x, q, matrix, inverse_scale in self._parts:
            quantized = cast(x.to(self._rounded_to), scale[matrix], self._dtype)
            q.copy_(quantized.view(torch.uint8).view_as(q))
            inverse_scale.copy_(inverse[matrix])


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, *, square: bool = False, rows: bool = True, transposed: bool = False
) -> Quantized:
    """The definition of ``quantize.quantize_blocks``."""
    check(x, dtype, rows, transposed)
    (q, inverse), (q_t, inverse_t) = (_quantize_blocks(each, dtype, square) for each in (x, x.t()))
    return only(Quantized(q, q_t, inverse, inverse_t), rows, transposed)


def transpose_bytes(q: Tensor) -> Tensor:
    """The definition of ``quantize.transpose_bytes``."""
    return q.t().contiguous()


def _quantize_blocks(x: Tensor, dtype: torch.dtype, square: bool) -> tuple[Tensor, Tensor]:
    height = BLOCK if square else 1
    n_rows, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % BLOCK, 0, -n_rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // BLOCK, BLOCK)
    scale, inverse = scales(blocks.abs().amax(dim=(1, 3)).float(), dtype)
    return cast(x, _repeated(scale, x, height), dtype), inverse


def _repeated(scale: Tensor, x: Tensor, height: int) -> Tensor:
    return scale.repeat_interleave(height, dim=0).repeat_interleave(BLOCK, dim=1)[: x.shape[0], : x.shape[1]]


def dequantize(q: Tensor, inverse_scale: Tensor) -> Tensor:
    """q (T, D) times its inverse scale, which may have any form, in fp32."""
    if inverse_scale.dim() == 2 and inverse_scale.shape[1] == -(-q.shape[1] // BLOCK):
        height = 1 if inverse_scale.shape[0] == q.shape[0] else BLOCK
        inverse_scale = _repeated(inverse_scale, q, height)
    return q.float() * inverse_scale
