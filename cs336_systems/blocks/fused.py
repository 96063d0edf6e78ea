"""The fused kernels as a written-out block calls them: every operation between its matrix products is one launch.

Matmuls are torch's, our own kernels (some with SwiGLU) for shapes where those are faster, or the fastest that was
measured (``kernels/matmul.py``). Attention is causal, reads slices of q | k | v, and writes gradients into given
slices:

    ops = dataclasses.replace(KERNELS, **FLASH_ATTENTION)

Gradients are bit-identical from run to run with ``FLASH_ATTENTION``, with ``HOPPER_ATTENTION`` if torch is told to use
deterministic algorithms, and with ``HOPPER_ATTENTION_IN_ORDER``. Only then are they bit-identical between levels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention.flash import function as flash
from cs336_systems.attention.hopper import function as hopper
from cs336_systems.blocks.maxima import FusedQuantizers, Quantizers
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.kernels.absmax import absmax, row_and_column_absmax
from cs336_systems.kernels.column_sums import column_sums
from cs336_systems.kernels.lora import expand_, factor_gradients_, shrink
from cs336_systems.kernels.matmul import (
    add_product_,
    product_,
    product_backward_,
    swiglu_product_,
    weight_backward_,
)
from cs336_systems.kernels.merge_attention import merge_attention_
from cs336_systems.kernels.norm_rotate import norm_rotate, norm_rotate_backward_
from cs336_systems.kernels.quantize import quantize, quantize_blocks, transpose_bytes
from cs336_systems.kernels.quantize_parts import PartsQuantizer
from cs336_systems.kernels.rms_norm import add_rms_norm_forward, rms_norm_backward, rms_norm_forward
from cs336_systems.kernels.rms_norm_quantize import add_rms_norm_absmax, rms_norm_absmax, rms_norm_quantize
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.kernels.swiglu import empty_slopes, swiglu_backward_, swiglu_forward
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize

KERNELS = BlockOps(
    rms_norm_forward=rms_norm_forward,
    add_rms_norm_forward=add_rms_norm_forward,
    rms_norm_backward=rms_norm_backward,
    product_=product_,
    add_product_=add_product_,
    product_backward_=product_backward_,
    weight_backward_=weight_backward_,
    swiglu_product_=swiglu_product_,
    swiglu_backward_=swiglu_backward_,
    column_sums=column_sums,
    rotate_=rotate_,
    norm_rotate=norm_rotate,
    norm_rotate_backward_=norm_rotate_backward_,
    lora_shrink=shrink,
    lora_expand_=expand_,
    lora_gradients_=factor_gradients_,
)
"""All operations but attention."""
QUANTIZERS = Quantizers(
    *(absmax, row_and_column_absmax, quantize, quantize_blocks, transpose_bytes, PartsQuantizer, swiglu_forward),
    raised=True,
    fused=FusedQuantizers(
        rms_norm_absmax, add_rms_norm_absmax, rms_norm_quantize, empty_slopes, swiglu_backward_quantize
    ),
)


def attention_ops(
    forward_op: Callable[..., Any], backward_op: Callable[..., Any], *options: Callable[[], bool]
) -> dict[str, Any]:
    """The fields of ``BlockOps`` for attention, from a forward operator and a backward one that writes its outputs in
    place.

    Args:
        options: functions that return the last arguments of ``backward_op``, called at each of its calls.
    """

    def forward(
        q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, causal: bool = True, **documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        o, lse = forward_op(q_BHSE, k_BKSE, v_BKSE, causal, q_BHSE.shape[-1] ** -0.5, **documents)
        return o, lse

    def backward(
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
        *,
        causal: bool = True,
        **further: Tensor,
    ) -> None:
        how = causal, q.shape[-1] ** -0.5, *(option() for option in options)
        backward_op(q, k, v, o, lse, do, *into, *how, **further)

    return {"attention_forward": forward, "attention_backward": backward, "attention_merge_": merge_attention_}


FLASH_ATTENTION = attention_ops(flash.forward_op, flash.backward_into_op)
_HOPPER = partial(attention_ops, hopper.forward_op, hopper.backward_into_op)
HOPPER_ATTENTION = _HOPPER(torch.are_deterministic_algorithms_enabled) | {"rotates_back": True}
HOPPER_ATTENTION_IN_ORDER = _HOPPER(lambda: True) | {"rotates_back": True}
