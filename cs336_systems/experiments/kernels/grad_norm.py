"""The L2 norm of one large tensor, against PyTorch's own."""

import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels import peers
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels.grad_norm import grad_norm, norm_table
from cs336_systems.training.precision import parameter_dtype


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width), normal, is read; one fp32 number is written."""
    x = torch.randn(cell.rows, cell.width, device=device, dtype=parameter_dtype(PRECISIONS[cell.dtype]))
    table = norm_table()
    others = {"torch": peers.torch_grad_norm}
    return Subject({"x": x}, lambda x: grad_norm([x], table), torch.linalg.vector_norm, x.nbytes, peers=others)
