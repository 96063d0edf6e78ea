"""FlashAttention-2 as torch sees it: validation, two opaque operators, the autograd Function, the public function.

One route. ``FlashAttention`` calls two operators registered with torch.library, forward and backward, whose fake
implementations say shapes, dtypes and layouts. ``torch.compile(fullgraph=True)`` traces through the Function, keeps the
operators as they are, and sees no kernel; eager code runs the same lines. The operators are 4-D and have no autograd
formula of their own: the Function is it, and a second derivative raises.

``flash_attention`` is ``FlashAttention.apply`` with names. Saved for backward: q, k, v, o, and one tensor of shape
(batch[, heads], n_queries): the natural log-sum-exp, in fp32.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention.flash.backward import launch_backward
from cs336_systems.attention.flash.forward import flash_forward_kernel, launch_forward
from cs336_systems.attention.flash.host import with_short_rows
from cs336_systems.attention.shapes import kernel_limits, validate


def check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """The scale to use, 1/sqrt(d) if none is given.

    Raises:
        ValueError: inputs that the kernels cannot take; the message holds the values.
    """
    shape = validate(q, k, v, scale=scale)
    if reason := kernel_limits(q):
        raise ValueError(reason)
    if not q.is_cuda and isinstance(flash_forward_kernel, triton.JITFunction):
        raise ValueError(
            f"the Triton kernels need CUDA tensors (or TRITON_INTERPRET=1 before they are imported), got {q.device}"
        )
    return shape.default_scale if scale is None else scale


@torch.library.custom_op("cs336_systems::flash_attention_forward", mutates_args=())
def forward_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse) of (batch, heads, seq, d) inputs."""
    return launch_forward(q, k, v, causal, scale)


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(with_short_rows(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("cs336_systems::flash_attention_backward", mutates_args=())
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    wants_dq: bool,
    wants_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); empty tensors stand for those not wanted, since an operator cannot return None."""
    gradients = launch_backward(q, k, v, o, lse, do, causal, scale, wants_dq, wants_dkdv)
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv


@backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    wants_dq: bool,
    wants_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = ((q, wants_dq), (k, wants_dkdv), (v, wants_dkdv))
    dq, dk, dv = (torch.empty_like(with_short_rows(x)) if want else x.new_empty(0) for x, want in wanted)
    return dq, dk, dv


def _with_heads(x: Tensor) -> Tensor:
    """(batch, seq, d) as (batch, 1, seq, d); 4-D as it is."""
    return x.unsqueeze(1) if x.dim() == 3 else x


class FlashAttention(torch.autograd.Function):
    """``FlashAttention.apply(q, k, v, is_causal=False, scale=None)``; see ``flash_attention``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        scale = check_inputs(q, k, v, scale)
        o, lse = forward_op(_with_heads(q), _with_heads(k), _with_heads(v), is_causal, scale)
        if q.dim() == 3:
            o, lse = o.squeeze(1), lse.squeeze(1)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        wants_dq, wants_dk, wants_dv = ctx.needs_input_grad[:3]
        gradients = backward_op(
            *(_with_heads(x) for x in (q, k, v, o)),
            lse if lse.dim() == 3 else lse.unsqueeze(1),
            _with_heads(do),
            ctx.is_causal,
            ctx.scale,
            wants_dq,
            wants_dk or wants_dv,
        )
        wanted = zip(gradients, (q, k, v), (wants_dq, wants_dk, wants_dv), strict=True)
        dq, dk, dv = (gradient.view(x.shape) if want else None for gradient, x, want in wanted)
        return dq, dk, dv, None, None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) v by the Triton kernels: exact attention that never stores a score.

    q is (batch, heads, n_queries, d) and k, v are (batch, kv_heads, n_keys, d), where kv_heads divides heads; or all
    are (batch, seq, d). Any strides; a last stride other than 1 costs a copy. Returns a tensor laid out like q.

    Args:
        causal: query i sees the keys j <= i + n_keys - n_queries, so that the last query sees all; a query that sees
            none gives zeros.
        scale: of the scores, 1/sqrt(d) if None.

    Raises:
        ValueError: shapes, dtypes (fp32, bf16 and fp16 are taken), devices or a head dim outside 16..256.
    """
    return FlashAttention.apply(q, k, v, causal, scale)
