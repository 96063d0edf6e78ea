"""The L2 norm of many gradients together, and gradients scaled to one.

bf16 is converted to fp32 first. On a CPU torch's fp32 norm of 33 million normal numbers is 1.8e-3 too small, of as many
equal ones 1.7e-2 too large; a norm of the norms of pieces is within 7e-7 and 6e-6. ``kernels/grad_norm.py`` is faster
on GPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 8192
"""Numbers of a piece. 33 million take 25 ms on two threads; 15 with 65,536, up to 3e-5 off; torch's norm takes 12."""


def joint_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """L2 norm of all numbers of dense tensors on ``device``, shape (): the widest of their dtypes, fp32 at least."""
    widest = torch.float32
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        pieces = [tensor for tensor in tensors if tensor.dtype == dtype]
        if device.type == "cpu":
            pieces = [piece for tensor in pieces for piece in tensor.reshape(-1).split(PIECE)]
        wide = torch.promote_types(dtype, torch.float32)
        widest = torch.promote_types(widest, wide)
        norms += torch._foreach_norm(pieces, 2, dtype=wide)
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(widest) for norm in norms]))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor for gradients of this joint norm, shape (), as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_to_norm(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply tensors in place by ``clip_factor``; the norm is that of them and of other ranks' together."""
    if tensors:
        torch._foreach_mul_(list(tensors), clip_factor(norm, max_norm))


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError for a norm to clip to that is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
