"""Hopper attention as torch sees it: what it takes, two opaque operators, the autograd Function, the public function.

The same route as ``attention/flash``: ``HopperFlashAttention`` calls two operators registered with torch.library, whose
fake implementations say shapes, dtypes and layouts, so that ``torch.compile(fullgraph=True)`` traces through the
Function and sees no kernel. The operators are 4-D, with no autograd formula of their own; a second derivative raises.

Saved for backward: q, k, v, o, and one tensor of shape (batch[, heads], n_queries): the natural log-sum-exp, in fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention.hopper.backward import launch_backward
from cs336_systems.attention.hopper.forward import launch_forward
from cs336_systems.attention.hopper.host import empty_result
from cs336_systems.attention.shapes import hopper_limits, validate


def check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """The scale to use, 1/sqrt(d) if none is given.

    Raises:
        ValueError: inputs that the kernels cannot take; the message holds the values, and what takes them instead.
    """
    shape = validate(q, k, v, scale=scale)
    if reason := hopper_limits(q):
        raise ValueError(reason)
    return shape.default_scale if scale is None else scale


@torch.library.custom_op("cs336_systems::hopper_attention_forward", mutates_args=())
def forward_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse) of (batch, heads, seq, d) inputs."""
    with torch.cuda.device_of(q):  # Triton launches on the current device, which may be another
        return launch_forward(q, k, v, causal, scale)


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return empty_result(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("cs336_systems::hopper_attention_backward", mutates_args=())
def backward_op(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float, ordered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of (batch, heads, seq, d) inputs; ``ordered`` fixes the order in which dq is summed."""
    with torch.cuda.device_of(q):
        return launch_backward(q, k, v, o, lse, do, causal, scale, ordered)


@backward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float, ordered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_result(q), empty_result(k), empty_result(v)


def _with_heads(x: Tensor) -> Tensor:
    """(batch, seq, d) as (batch, 1, seq, d); 4-D as it is."""
    return x.unsqueeze(1) if x.dim() == 3 else x


class HopperFlashAttention(torch.autograd.Function):
    """``HopperFlashAttention.apply(q, k, v, is_causal=False, scale=None, deterministic=False)``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        scale = check_inputs(q, k, v, scale)
        o, lse = forward_op(_with_heads(q), _with_heads(k), _with_heads(v), is_causal, scale)
        if q.dim() == 3:
            o, lse = o.squeeze(1), lse.squeeze(1)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        ctx.ordered = deterministic or torch.are_deterministic_algorithms_enabled()
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        gradients = backward_op(
            *(_with_heads(x) for x in (q, k, v, o)),
            lse if lse.dim() == 3 else lse.unsqueeze(1),
            _with_heads(do),
            ctx.is_causal,
            ctx.scale,
            ctx.ordered,
        )
        wanted = zip(gradients, (q, k, v), ctx.needs_input_grad[:3], strict=True)
        dq, dk, dv = ((g if x.dim() == 4 else g.squeeze(1)) if want else None for g, x, want in wanted)
        return dq, dk, dv, None, None, None


def hopper_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, deterministic: bool = False
) -> Tensor:
    """softmax(scale q k^T) v by kernels written for Hopper GPUs: exact attention that never stores a score.

    q is (batch, heads, n_queries, d) and k, v are (batch, kv_heads, n_keys, d), where kv_heads divides heads; or all
    are (batch, seq, d). Strides of batch, head and sequence are free as long as they are positive multiples of 16
    bytes; others, a last stride other than 1, and a first element off a 16-byte boundary, cost a copy. Returns a tensor
    laid out like q, or contiguous where q's strides cost a copy.

    Args:
        causal: query i sees the keys j <= i + n_keys - n_queries, so that the last query sees all; a query that sees
            none gives zeros.
        scale: of the scores, 1/sqrt(d) if None.
        deterministic: sum dq in a fixed order, so that gradients have the same bits every run; also where torch is
            told to use deterministic algorithms. The output always has.

    Raises:
        ValueError: not a Hopper GPU, neither bf16 nor fp16, a head dim that is not one of 16, 24, ... 128, or
            shapes that do not fit together.
    """
    return HopperFlashAttention.apply(q, k, v, causal, scale, deterministic)
