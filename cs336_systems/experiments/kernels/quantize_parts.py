"""Matrices in parts quantized to e4m3, largest magnitudes found first, against the definition in plain PyTorch."""

import torch
from torch import Tensor

from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.experiments.kernels.quantize import FP8, matrix
from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.quantize_parts import PartsQuantizer
from cs336_systems.kernels.quantize_reference import Part

N_MATRICES, N_PARTS = 4, 2
"""Of each of the matrices."""


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), four matrices in two parts each, is read twice and written as bytes, with the error of e4m3."""
    x, n_parts = matrix(cell, device), N_MATRICES * N_PARTS
    made: dict[int, tuple[PartsQuantizer, Tensor]] = {}

    def ours(x: Tensor) -> Tensor:
        if x.data_ptr() not in made:  # as who quantizes the same memory again and again
            q, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(N_MATRICES, device=device)
            pieces = enumerate(zip(x.chunk(n_parts), q.chunk(n_parts), strict=True))
            parts = [Part(*piece, i // N_PARTS, scales[i // N_PARTS]) for i, piece in pieces]
            made.clear()
            made[x.data_ptr()] = PartsQuantizer(parts, FP8), q
        quantizer, q = made[x.data_ptr()]
        quantizer.quantize_(quantizer.absmax())
        return q.view(FP8)

    def eager(x: Tensor) -> Tensor:
        matrices = x.view(N_MATRICES, -1)
        absmax = matrices.abs().amax(dim=1, keepdim=True)
        if x.dtype == torch.float64:
            return (matrices * (reference.LARGEST[FP8] / absmax)).view_as(x)
        return reference.cast(matrices, reference.scales(absmax.float(), FP8)[0], FP8).view_as(x)

    return Subject({"x": x}, ours, eager, 2 * x.nbytes + x.numel())
