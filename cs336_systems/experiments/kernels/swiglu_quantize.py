"""SwiGLU's backward into e4m3, against the formula and the definition of quantization, one after the other."""

import torch
from torch import Tensor

from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.experiments.kernels.quantize import FP8, matrix
from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.swiglu import empty_slopes, swiglu_forward
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize
from cs336_systems.model import ops


def gradients(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate | dup, z)."""
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return torch.cat([dz * up * (sigmoid + silu * (1 - sigmoid)), dz * silu], dim=-1), ops.swiglu(gate, up)


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """dz (rows, width) and gate_up (rows, 2 width), which are read; a byte is written for each element of gate_up's
    gradient as it is and transposed, and of z transposed. What ours reads a second time is not counted. The errors are
    those of e4m3."""
    dz, gate_up = matrix(cell, device), torch.cat([matrix(cell, device), matrix(cell, device)], dim=1)
    slopes = empty_slopes(gate_up)
    swiglu_forward(gate_up, slopes=slopes)
    dgate_up_absmax, z_absmax = map(quantize_reference.absmax, gradients(dz, gate_up))

    def reference(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        dgate_up, z = gradients(dz, gate_up)
        if dz.dtype == torch.float64:
            q, z_t = (
                x * (quantize_reference.LARGEST[FP8] / absmax.double())
                for x, absmax in ((dgate_up, dgate_up_absmax), (z.t(), z_absmax))
            )
            return q, q.t(), z_t
        found = quantize_reference.quantize(dgate_up, dgate_up_absmax, FP8, transposed=True)
        again = quantize_reference.quantize(z, z_absmax, FP8, rows=False, transposed=True)
        return _present(found.q, found.q_t, again.q_t)

    def ours(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        slot = torch.zeros((), device=dz.device)
        found, again = swiglu_backward_quantize(dz, gate_up, slopes, slot, FP8, z_absmax=z_absmax)
        return _present(found.q, found.q_t, None if again is None else again.q_t)

    n_bytes = dz.nbytes + gate_up.nbytes + 5 * dz.numel()
    return Subject({"dz": dz, "gate_up": gate_up}, ours, reference, n_bytes)


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)
