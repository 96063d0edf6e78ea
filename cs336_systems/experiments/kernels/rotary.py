"""Rotary positions of one sequence's heads as they lie after the product that makes them, beside the formula."""

import torch

from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.experiment import Subject
from cs336_systems.kernels.rotary import rotary
from cs336_systems.model import ops
from cs336_systems.training.precision import parameter_dtype

D_HEAD = 128


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (1, heads, rows, 128), normal, each row's heads together, and the fp32 angles of ``rows`` positions. Forward
    reads them and writes as much as x; backward does the same with the gradient.

    Raises:
        Unsupported: a width that heads do not divide.
    """
    if cell.width % D_HEAD:
        raise Unsupported(f"heads of {D_HEAD} do not divide a width of {cell.width}")
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    rows = torch.randn(1, cell.rows, cell.width // D_HEAD, D_HEAD, device=device, dtype=dtype)
    x = rows.transpose(1, 2).requires_grad_()
    angle = 2 * torch.pi * torch.rand(cell.rows, D_HEAD // 2, device=device)
    cos, sin = angle.cos(), angle.sin()
    n_bytes = 2 * x.nbytes + cos.nbytes + sin.nbytes
    return Subject({"x": x, "cos": cos, "sin": sin}, rotary, ops.rotary, n_bytes, n_bytes)
