"""SwiGLU on one merged matrix of gates and ups, against the formula on its halves."""

import torch
from torch import Tensor

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels import peers
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.swiglu import swiglu, swiglu_forward
from cs336_systems.model import ops
from cs336_systems.training.precision import parameter_dtype


def reference(gate_up: Tensor) -> Tensor:
    return ops.swiglu(*gate_up.chunk(2, dim=-1))


def reference_with_absmax(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    z = reference(gate_up)
    return z, quantize_reference.absmax(z)


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """gate_up (rows, 2 width), normal. Forward reads it and writes z (rows, width); backward reads it and the gradient
    of z, and writes its gradient. With absmax forward alone is measured."""
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    gate_up = torch.randn(cell.rows, 2 * cell.width, device=device, dtype=dtype)
    z = gate_up.nbytes // 2
    if cell.form == "absmax":
        slot = torch.zeros((), device=device)
        return Subject(
            {"gate_up": gate_up}, lambda x: (swiglu_forward(x, slot), slot), reference_with_absmax, gate_up.nbytes + z
        )
    gate_up.requires_grad_()
    passes = {"forward_bytes": gate_up.nbytes + z, "backward_bytes": 2 * gate_up.nbytes + z}
    return Subject({"gate_up": gate_up}, swiglu, reference, **passes, peers={"liger": peers.liger_swiglu})
