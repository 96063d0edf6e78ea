"""The sum over the rows of a matrix, against PyTorch's."""

import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels.column_sums import column_sums
from cs336_systems.training.precision import parameter_dtype


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), normal, is read; its sums (width,) are written."""
    x = torch.randn(cell.rows, cell.width, device=device, dtype=parameter_dtype(PRECISIONS[cell.dtype]))
    return Subject({"x": x}, column_sums, lambda x: x.sum(0), x.nbytes + cell.width * x.itemsize)
