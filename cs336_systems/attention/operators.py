"""What the autograd Functions of the Triton and the Hopper kernels share: a pair of opaque operators.

One route. A Function calls two operators registered with torch.library, forward and backward, whose fake
implementations say shapes, dtypes and layouts. ``torch.compile(fullgraph=True)`` traces through the Function, keeps the
operators as they are, and sees no kernel; eager code runs the same lines. The operators are 4-D and have no autograd
formula of their own: the Function is it, and a second derivative raises.

Saved for backward: q, k, v, o, and one tensor of shape (batch[, heads], n_queries): the natural log-sum-exp, in fp32.
"""

import math
from typing import Any

from torch import Tensor
from torch._ops import OpOverload


def forward_through(
    op: OpOverload,
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """o like q from ``op(q, k, v, causal, scale)``, which gives (o, lse); scale is 1/sqrt(d_head) if None."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.dim() == 3:
        o, lse = (x.squeeze(1) for x in op(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal, scale))
    else:
        o, lse = op(q, k, v, is_causal, scale)
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.is_causal, ctx.scale = is_causal, scale
    return o


def backward_through(op: OpOverload, ctx: Any, do: Tensor, *options: bool) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv), None where not wanted, from ``op(q, k, v, o, lse, do, causal, scale, *options)``."""
    tensors = (*ctx.saved_tensors, do)
    if one_head := do.dim() == 3:
        tensors = tuple(x.unsqueeze(1) for x in tensors)
    gradients = op(*tensors, ctx.is_causal, ctx.scale, *options)
    wanted = [x if want else None for x, want in zip(gradients, ctx.needs_input_grad[:3], strict=True)]
    if one_head:
        wanted = [x if x is None else x.squeeze(1) for x in wanted]
    return tuple(wanted)
