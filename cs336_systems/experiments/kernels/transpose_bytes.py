"""The transpose of a matrix in e4m3, against PyTorch's copy."""

import torch

from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.experiments.kernels.quantize import FP8, matrix
from cs336_systems.kernels.quantize import transpose_bytes


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), normal numbers rounded to e4m3 whatever the cell's dtype, is read and written."""
    x = matrix(cell, device).to(FP8)
    return Subject({"x": x}, transpose_bytes, lambda x: x.t().contiguous(), 2 * x.nbytes)
