"""Quantization to e4m3 with a scale that is known, as it is and transposed, against the definition in plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Function, Subject
from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.quantize import quantize
from cs336_systems.kernels.quantize_reference import Quantized
from cs336_systems.training.precision import parameter_dtype

FP8 = torch.float8_e4m3fn


def matrix(cell: KernelCell, device: torch.device) -> Tensor:
    """x (rows, width), normal.

    Raises:
        Unsupported: 16 does not divide both.
    """
    if cell.rows % quantize_reference.QUANTUM or cell.width % quantize_reference.QUANTUM:
        raise Unsupported(f"{quantize_reference.QUANTUM} does not divide {cell.rows} x {cell.width}")
    return torch.randn(cell.rows, cell.width, device=device, dtype=parameter_dtype(PRECISIONS[cell.dtype]))


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), which is read; a byte is written for each element, or two with the transposed copy. The error is
    that of e4m3."""
    x = matrix(cell, device)
    absmax, transposed = quantize_reference.absmax(x), cell.form == "transposed"

    def of(quantizer: Callable[..., Quantized]) -> Function:
        def quantized(x: Tensor) -> tuple[Tensor, ...]:
            if x.dtype == torch.float64:
                exact = x * (quantize_reference.LARGEST[FP8] / absmax.double())
                return (exact, exact.t())[: 1 + transposed]
            found = quantizer(x, absmax, FP8, transposed=transposed)
            return present(found)

        return quantized

    return Subject({"x": x}, of(quantize), of(quantize_reference.quantize), x.nbytes + (1 + transposed) * x.numel())


def present(found: Quantized) -> tuple[Tensor, ...]:
    """What was quantized, in one or both ways."""
    return tuple(each for each in found[:2] if each is not None)
