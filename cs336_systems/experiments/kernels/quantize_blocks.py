"""Quantization to e4m3 with scales of 1 x 128, as it is and transposed, against the definition in plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Function, Subject
from cs336_systems.experiments.kernels.quantize import FP8, matrix
from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.quantize_blocks import quantize_blocks
from cs336_systems.kernels.quantize_reference import Quantized


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), which is read; writes two bytes for each element, and scales. The error is that of e4m3."""
    x = matrix(cell, device)

    def of(quantizer: Callable[..., Quantized]) -> Function:
        def quantized(x: Tensor) -> tuple[Tensor, ...]:
            found = quantizer(x.float() if x.dtype == torch.float64 else x, FP8, transposed=True)
            q, q_t, inverse, inverse_t = (each for each in found if each is not None)
            if x.dtype != torch.float64:
                return q, q_t
            # What the scales make of x before it is rounded.
            ones = torch.ones_like(q, dtype=torch.float32)
            scales, scales_t = (
                quantize_reference.dequantize(*pair) for pair in ((ones, inverse), (ones.t(), inverse_t))
            )
            return x / scales, x.t() / scales_t

        return quantized

    scales = 2 * 4 * x.numel() // quantize_reference.BLOCK
    n_bytes = x.nbytes + 2 * x.numel() + scales
    return Subject({"x": x}, of(quantize_blocks), of(quantize_reference.quantize_blocks), n_bytes)
