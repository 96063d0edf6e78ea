"""The attention kernels as a written-out block calls them: causal, on slices of q | k | v, gradients into given slices.

    ops = dataclasses.replace(REFERENCE, **FLASH_ATTENTION)

Gradients have the same bits every run with ``flash``, with ``hopper`` where torch is told to use deterministic
algorithms, and with ``HOPPER_ATTENTION_IN_ORDER``; only then do those of different levels agree to the bit.
"""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

from cs336_systems.attention.flash import function as flash
from cs336_systems.attention.hopper import function as hopper


class AttentionOps(TypedDict):
    """The two fields of ``BlockOps`` that are attention."""

    attention_forward: Callable[..., tuple[Tensor, Tensor]]
    attention_backward: Callable[..., None]


def _through(
    forward_op: Callable[..., Any], backward_op: Callable[..., Any], *options: Callable[[], bool]
) -> AttentionOps:
    """Of two operators, the second writing into what it is given; ``options`` are its own, asked for at each call."""

    def forward(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = forward_op(q_BHSE, k_BKSE, v_BKSE, True, q_BHSE.shape[-1] ** -0.5)
        return o, lse

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, into: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        backward_op(q, k, v, o, lse, do, *into, True, q.shape[-1] ** -0.5, *(option() for option in options))

    return {"attention_forward": forward, "attention_backward": backward}


FLASH_ATTENTION = _through(flash.forward_op, flash.backward_into_op)
HOPPER_ATTENTION = _through(hopper.forward_op, hopper.backward_into_op, torch.are_deterministic_algorithms_enabled)
HOPPER_ATTENTION_IN_ORDER = _through(hopper.forward_op, hopper.backward_into_op, lambda: True)
