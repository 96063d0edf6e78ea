"""The weighted sum of each row, against the matrix-vector product that PyTorch has for it."""

import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels.weighted_sum import weighted_sum
from cs336_systems.training.precision import parameter_dtype


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width) and weight (width,), normal. Forward reads both and writes out (rows,); backward reads both and
    the gradient of out, and writes the gradients of both."""
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    x = torch.randn(cell.rows, cell.width, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(cell.width, device=device, dtype=dtype).requires_grad_()
    both, out = x.nbytes + weight.nbytes, cell.rows * dtype.itemsize
    return Subject({"x": x, "weight": weight}, weighted_sum, lambda x, weight: x @ weight, both + out, 2 * both + out)
