"""Hopper attention as torch sees it: two opaque operators, and the autograd Functions on them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.attention.hopper import host
from cs336_systems.attention.hopper.backward import launch_backward
from cs336_systems.attention.hopper.forward import launch_forward
from cs336_systems.attention.hopper.host import empty_result
from cs336_systems.attention.shapes import backward_through, check_starts, forward_through, hopper_limits, validate
from cs336_systems.kernels.launching import operator


def _forward_results(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return empty_result(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_result(q), empty_result(k), empty_result(v)


@operator("hopper_attention_forward", _forward_results)
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse) of (batch, heads, seq, d) inputs; ``starts`` as for ``dispatch.attention``."""
    with host.on_device_of(q):
        return launch_forward(q, k, v, causal, scale, starts_BQ=starts)


@operator("hopper_attention_backward", _backward_results)
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    ordered: bool,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of (batch, heads, seq, d) inputs; ``ordered`` fixes the order in which dq is summed."""
    dq, dk, dv = _backward_results(q, k, v)
    with host.on_device_of(q):
        launch_backward(q, k, v, o, lse, do, dq, dk, dv, causal, scale, ordered, starts_BQ=starts)
    return dq, dk, dv


@operator("hopper_attention_backward_into", lambda *_: None, mutates=("dq", "dk", "dv", "absmax"))
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
    ordered: bool,
    starts: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    absmax: Tensor | None = None,
) -> None:
    """``backward_op``, written into dq, dk and dv, whose strides are free as those of inputs are.

    cos and sin, if they are there, are ``rotation`` of ``launch_backward``.
    """
    rotation = None if cos is None or sin is None else (cos, sin)
    with host.on_device_of(q):
        launch_backward(q, k, v, o, lse, do, dq, dk, dv, causal, scale, ordered, None, starts, rotation, absmax)


class HopperKernels(torch.autograd.Function):
    """``HopperFlashAttention`` for inputs that have been checked already: checks nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        scale: float | None,
        deterministic: bool = False,
        starts: Tensor | None = None,
    ) -> Tensor:
        ctx.ordered, ctx.starts = deterministic or torch.are_deterministic_algorithms_enabled(), starts
        return forward_through(forward_op, ctx, q, k, v, is_causal, scale, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return *backward_through(backward_op, ctx, do, ctx.ordered, ctx.starts), None, None, None, None


class HopperFlashAttention(HopperKernels):
    """``HopperFlashAttention.apply(q, k, v, is_causal=False, scale=None, deterministic=False, starts=None)``.

    Shapes, mask and scale are those of ``flash.FlashAttention``. Strides of batch, head and sequence are free as long
    as they are positive multiples of 16 bytes; others, a last stride other than 1, and a first element off a 16-byte
    boundary, cost a copy. Returns a tensor laid out like q, or contiguous where q's strides cost a copy.

    Args:
        deterministic: sum dq in a fixed order, so that gradients have the same bits every run; also where torch is
            told to use deterministic algorithms. The output always has.
        starts: as for ``dispatch.attention``.

    Raises:
        ValueError: not a Hopper GPU, neither bf16 nor fp16, a head dim that is not one of 16, 24, ... 128, or
            shapes that do not fit together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        deterministic: bool = False,
        starts: Tensor | None = None,
    ) -> Tensor:
        shape = validate(q, k, v, scale=scale)
        if starts is not None:
            check_starts(shape, is_causal, starts)
        if reason := hopper_limits(q):
            raise ValueError(reason)
        return HopperKernels.forward(ctx, q, k, v, is_causal, scale, deterministic, starts)
