"""FlashAttention-2 as torch sees it: two opaque operators, and the autograd Functions on them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention.flash.backward import launch_backward
from cs336_systems.attention.flash.forward import flash_forward_kernel, launch_forward
from cs336_systems.attention.flash.tiles import with_short_rows
from cs336_systems.attention.shapes import backward_through, check_starts, forward_through, kernel_limits, validate
from cs336_systems.kernels.launching import needs_other_device, operator


def _forward_results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(with_short_rows(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_results(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wants_dq, wants_dkdv, *_ = rest[5:]  # behind o, lse, do, causal and scale
    wanted = ((q, wants_dq), (k, wants_dkdv), (v, wants_dkdv))
    dq, dk, dv = (torch.empty_like(with_short_rows(x)) if want else x.new_empty(0) for x, want in wanted)
    return dq, dk, dv


@operator("flash_attention_forward", _forward_results)
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse) of (batch, heads, seq, d) inputs; ``starts`` as of ``attention``."""
    return launch_forward(q, k, v, causal, scale, starts)


@operator("flash_attention_backward", _backward_results)
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
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); an empty tensor for each that is not requested, since an operator cannot return None."""
    dq, dk, dv = _backward_results(q, k, v, o, lse, do, causal, scale, wants_dq, wants_dkdv)
    into_q, into_k, into_v = dq if wants_dq else None, dk if wants_dkdv else None, dv if wants_dkdv else None
    launch_backward(q, k, v, o, lse, do, into_q, into_k, into_v, causal, scale, starts)
    return dq, dk, dv


@operator("flash_attention_backward_into", lambda *_: None, mutates=("dq", "dk", "dv"))
def backward_into_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    causal: bool,
    scale: float,
    starts: Tensor | None = None,
) -> None:
    """``backward_op``, written into dq, dk and dv of any strides; a last stride other than 1 costs a copy."""
    launch_backward(q, k, v, o, lse, do, dq, dk, dv, causal, scale, starts)


class FlashKernels(torch.autograd.Function):
    """``FlashAttention`` for inputs that have been checked already: checks nothing."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, starts: Tensor | None = None
    ) -> Tensor:
        ctx.starts = starts
        return forward_through(forward_op, ctx, q, k, v, is_causal, scale, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        wants_dq, wants_dk, wants_dv = ctx.needs_input_grad[:3]
        return *backward_through(backward_op, ctx, do, wants_dq, wants_dk or wants_dv, ctx.starts), None, None, None


class FlashAttention(FlashKernels):
    """``FlashAttention.apply(q, k, v, is_causal=False, scale=None, starts=None)``.

    softmax(scale q k^T) v, exact, without storing a score.

    q is (batch, heads, n_queries, d) and k, v are (batch, kv_heads, n_keys, d), where kv_heads divides heads; or all
    are (batch, seq, d). Any strides; a last stride other than 1 costs a copy. Returns a tensor laid out like q.

    Args:
        is_causal: query i sees the keys j <= i + n_keys - n_queries, so that the last query sees all; a query that sees
            none gives zeros.
        scale: of the scores, 1/sqrt(d) if None.
        starts: as of ``dispatch.attention``.

    Raises:
        ValueError: invalid shapes, dtypes (fp32, bf16 and fp16 are supported), devices or a head dim outside 16..256.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        shape = validate(q, k, v, scale=scale)
        if starts is not None:
            check_starts(shape, is_causal, starts)
        if reason := kernel_limits(q):
            raise ValueError(reason)
        if needs_other_device(flash_forward_kernel, q.device):
            raise ValueError(f"the Triton kernels need CUDA tensors, got {q.device}: TiledFlashAttention takes any")
        return FlashKernels.forward(ctx, q, k, v, is_causal, scale, starts)
