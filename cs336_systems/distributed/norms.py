"""The joint L2 norm of many gradients, and scaling of gradients to a norm.

bf16 is converted to fp32 first. On a CPU torch's fp32 norm of 33 million normally distributed numbers is 1.8e-3 too
small, of as many equal numbers 1.7e-2 too large; a norm of the norms of pieces is within 7e-7 and 6e-6.
``kernels/grad_norm.py`` is faster on GPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 8192
"""Numbers per piece. 33 million take 25 ms on two threads; 15 ms with 65,536, up to 3e-5 off; torch's norm 12 ms."""


def joint_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """L2 norm of all numbers of dense tensors, shape () on ``device``, in the widest of their dtypes, at least fp32."""
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
    """The factor, shape (), that clips gradients of this joint norm, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_to_norm(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply tensors in place by ``clip_factor``; the norm is the joint one of these and other ranks' tensors."""
    if tensors:
        torch._foreach_mul_(list(tensors), clip_factor(norm, max_norm))


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError unless the norm to clip to is positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
