"""RMSNorm against the reference model's, torch's and Liger's."""

import functools

import torch
from torch import Tensor

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels import peers
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.rms_norm import rms_norm, rms_norm_forward
from cs336_systems.model import ops
from cs336_systems.training.precision import parameter_dtype

EPS = 1e-5


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """x (rows, width) and weight (width,), normal. Forward reads both and writes y like x; backward reads both and the
    gradient of y, and writes the gradients of both. With absmax forward alone is measured."""
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    if cell.form == "absmax":
        return with_absmax(cell, device, dtype)
    x = torch.randn(cell.rows, cell.width, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(cell.width, device=device, dtype=dtype).requires_grad_()
    ours, reference = (functools.partial(norm, eps=EPS) for norm in (rms_norm, ops.rms_norm))
    passes = {"forward_bytes": 2 * x.nbytes + weight.nbytes, "backward_bytes": 3 * x.nbytes + 2 * weight.nbytes}
    others = {
        "torch": functools.partial(peers.torch_rms_norm, EPS),
        "liger": functools.partial(peers.liger_rms_norm, EPS),
    }
    return Subject({"x": x, "weight": weight}, ours, reference, **passes, peers=others)


def with_absmax(cell: KernelCell, device: torch.device, dtype: torch.dtype) -> Subject:
    """Forward, and the largest magnitude of y."""
    x = torch.randn(cell.rows, cell.width, device=device, dtype=dtype)
    weight, slot = torch.randn(cell.width, device=device, dtype=dtype), torch.zeros((), device=device)

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_forward(x, weight, EPS, slot)[0], slot

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.rms_norm(x, weight, EPS)
        return y, quantize_reference.absmax(y)

    return Subject({"x": x, "weight": weight}, ours, reference, 2 * x.nbytes + weight.nbytes)
