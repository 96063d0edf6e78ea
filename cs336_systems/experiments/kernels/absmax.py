"""The largest magnitude, against PyTorch's."""

import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels.absmax import absmax
from cs336_systems.kernels.quantize_reference import absmax as reference
from cs336_systems.training.precision import parameter_dtype


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), normal, which is read."""
    x = torch.randn(cell.rows, cell.width, device=device, dtype=parameter_dtype(PRECISIONS[cell.dtype]))
    return Subject({"x": x}, absmax, reference, x.nbytes)
