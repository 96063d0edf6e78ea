"""RMSNorm into e4m3, both passes, against the formula and the definition of quantization, one after the other."""

import torch
from torch import Tensor

from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.experiments.kernels.quantize import FP8, matrix, present
from cs336_systems.experiments.kernels.rms_norm import EPS
from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.rms_norm_quantize import rms_norm_absmax, rms_norm_quantize
from cs336_systems.model import ops


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width) and weight (width,), which are read; a byte is written for each element of the norm as it is and
    transposed. What ours reads a second time is not counted. The errors are those of e4m3."""
    x = matrix(cell, device)
    weight = torch.randn(cell.width, device=device, dtype=x.dtype)
    absmax = quantize_reference.absmax(ops.rms_norm(x, weight, EPS))

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = ops.rms_norm(x, weight, EPS)
        if x.dtype == torch.float64:
            exact = y * (quantize_reference.LARGEST[FP8] / absmax.double())
            return exact, exact.t()
        return present(quantize_reference.quantize(y, absmax, FP8, transposed=True))

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        slot = torch.zeros((), device=x.device)
        rstd = rms_norm_absmax(x, weight, EPS, slot)
        return present(rms_norm_quantize(x, weight, rstd, slot, FP8, transposed=True))

    return Subject({"x": x, "weight": weight}, ours, reference, x.nbytes + weight.nbytes + 2 * x.numel())
