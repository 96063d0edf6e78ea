"""The L2 norm of many gradients together, and gradients scaled to one.

bf16 is widened first. On a CPU torch's fp32 norm of 4 million numbers is 8e-5 too small, of 33 million 2e-3: there it
is made of norms of pieces (7e-7 at most). ``kernels/grad_norm.py`` has a faster kernel for GPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 8192
"""Numbers of a piece."""


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


def scale_to_norm(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply tensors by max_norm / (norm + 1e-6) if that is below 1, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        norm: shape (); the joint norm of these tensors and of those of other ranks.
    """
    if tensors:
        torch._foreach_mul_(list(tensors), (max_norm / (norm + 1e-6)).clamp(max=1.0))


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError for a norm to clip to that is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
