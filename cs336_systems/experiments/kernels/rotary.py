"""Rotary positions of the queries and keys of one sequence, against the formula and Liger's.

Ours in place in a merged q | k | v, as a written-out block has it, of which v is left alone. The others have q and k in
memory of their own, as separate products leave them: token by token, a token's heads together.
"""

from typing import Any

import torch
from torch import Tensor

from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels import peers
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.model import ops
from cs336_systems.training.precision import parameter_dtype

D_HEAD = 128
SHARING = 4
"""Query heads for each key/value head, as in Llama-3 8B."""


class _InPlace(torch.autograd.Function):
    """``rotate_`` forward, and back again on the gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = n_heads, n_kv_heads
        rotate_(qkv.detach(), cos, sin, n_heads, n_kv_heads)
        return qkv

    @staticmethod
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        n_heads, n_kv_heads = ctx.heads
        rotate_(dqkv, cos, sin, n_heads, n_kv_heads, inverse=True)
        return dqkv, None, None, None, None


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """q (1, H, rows, 128), normal, and k (1, H / 4, rows, 128), and the fp32 angles of ``rows`` positions; width is
    128 H. Forward reads them and writes q and k; backward does the same with their gradients.

    Raises:
        Unsupported: a width that heads do not divide.
    """
    if cell.width % D_HEAD:
        raise Unsupported(f"heads of {D_HEAD} do not divide a width of {cell.width}")
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    n_heads = cell.width // D_HEAD
    n_kv_heads = max(1, n_heads // SHARING)
    q, k, v = (torch.randn(cell.rows, n * D_HEAD, device=device, dtype=dtype) for n in (n_heads, *2 * [n_kv_heads]))
    angle = 2 * torch.pi * torch.rand(cell.rows, D_HEAD // 2, device=device)
    cos, sin = angle.cos(), angle.sin()
    n_bytes = 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes

    def heads(x: Tensor) -> Tensor:
        return x.view(1, cell.rows, -1, D_HEAD).transpose(1, 2)

    def ours(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _InPlace.apply(qkv, cos, sin, n_heads, n_kv_heads)

    def merged_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_k, v = qkv.split(((n_heads + n_kv_heads) * D_HEAD, n_kv_heads * D_HEAD), dim=-1)
        return torch.cat((ops.rotary(heads(q_k), cos, sin).transpose(1, 2).flatten(2)[0], v), dim=-1)

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)

    inputs = {"qkv": torch.cat((q, k, v), dim=-1)} if cell.how == "ours" else {"q": heads(q), "k": heads(k)}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()} | {"cos": cos, "sin": sin}
    others = {"liger": lambda: peers.liger_rotary(D_HEAD)}
    formula = merged_reference if cell.how == "ours" else reference
    return Subject(inputs, ours, formula, n_bytes, n_bytes, others)
