"""The residual add and the RMSNorm behind it in one pass, against the reference model's two operations."""

import functools

import torch
from torch import Tensor

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels import peers
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.experiments.kernels.rms_norm import EPS
from cs336_systems.kernels.rms_norm import add_rms_norm
from cs336_systems.model import ops
from cs336_systems.training.precision import parameter_dtype


def reference(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = x + branch
    return residual, ops.rms_norm(residual, weight, EPS)


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x and branch (rows, width) and weight (width,), normal. Forward reads all and writes two results like x; backward
    reads the residual, weight and the gradients of both, and writes one gradient for x and branch, and weight's."""
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    x, branch = (torch.randn(cell.rows, cell.width, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(cell.width, device=device, dtype=dtype).requires_grad_()
    passes = {"forward_bytes": 4 * x.nbytes + weight.nbytes, "backward_bytes": 4 * x.nbytes + 2 * weight.nbytes}
    inputs = {"x": x, "branch": branch, "weight": weight}
    others = {"liger": functools.partial(peers.liger_add_rms_norm, EPS)}
    return Subject(inputs, functools.partial(add_rms_norm, eps=EPS), reference, **passes, peers=others)
