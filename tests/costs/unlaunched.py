"""A model of fused kernels where Triton does not run: its launchers allocate what they do, and launch nothing."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.flash import backward as flash_backward
from cs336_systems.attention.flash import forward as flash_forward
from cs336_systems.attention.flash import preprocess as flash_preprocess
from cs336_systems.blocks import BlockOps, block_products, quantized, reference, write_out
from cs336_systems.blocks.attention import _through
from cs336_systems.config import PRECISIONS, ModelConfig, Recipe
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.written_out_sizes import MULTIPROCESSORS
from cs336_systems.kernels import column_sums, rms_norm_kernels
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.training.precision import parameter_dtype

linear_cross_entropy, rms_norm, swiglu, absmax, quantize, rms_norm_quantize, swiglu_quantize = (
    import_module(f"cs336_systems.kernels.{name}")
    for name in (
        *("linear_cross_entropy", "rms_norm", "swiglu", "absmax", "quantize"),
        *("rms_norm_quantize", "swiglu_quantize"),
    )
)  # the package has functions of these names

CHUNK = 256
"""Tokens whose logits exist at a time."""


def leave_out_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers that allocate and do not launch, on devices that Triton does not know."""
    checked = (rms_norm, swiglu, linear_cross_entropy, absmax, quantize, rms_norm_quantize, swiglu_quantize)
    modules = (rms_norm_kernels, column_sums, *checked[1:], flash_forward, flash_backward, flash_preprocess)
    for module in modules:
        monkeypatch.setattr(module, "launch", lambda *args, **kwargs: None)
    for module in checked:
        monkeypatch.setattr(module, "check_runnable", lambda *args: None)
    monkeypatch.setattr(rms_norm_kernels, "INTERPRETED_MULTIPROCESSORS", MULTIPROCESSORS)
    monkeypatch.setattr(rms_norm, "rms_norm_forward", rms_norm_forward)
    monkeypatch.setattr(rms_norm, "rms_norm_backward", rms_norm_backward)
    monkeypatch.setattr(linear_cross_entropy, "linear_cross_entropy_op", linear_cross_entropy_op)
    monkeypatch.setattr(quantized, "_emulated", scaled_mm)


def scaled_mm(a, b, bias, fast, out, *, by) -> Tensor:
    """What a GPU's product allocates."""
    return torch.empty(len(a.values), len(b.values), dtype=a.dtype) if out is None else out


def rms_norm_forward(x: Tensor, gain: Tensor, eps: float, absmax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return rms_norm_kernels.launch_forward(x, None, gain, eps, None)[1:]


def add_rms_norm_forward(x, branch, gain, eps, absmax=None) -> tuple[Tensor, Tensor, Tensor]:
    return rms_norm_kernels.launch_forward(x, branch, gain, eps, None)


def rms_norm_backward(
    dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor, dresidual: Tensor | None = None, absmax: Tensor | None = None
):
    return rms_norm_kernels.launch_backward(dy, x, gain, rstd, dresidual, None, None)


def linear_cross_entropy_op(x, weight, targets, denominator, grad_weight, accumulate, wants_dx, *rest):
    *_, chunk = rest
    losses, dx, lse = linear_cross_entropy.in_chunks(
        x, weight, targets, grad_weight, accumulate, wants_dx, chunk, lambda *args: None
    )
    return losses.sum(), dx, lse


def hopper_backward(q, *rest) -> None:
    """What attention/hopper allocates, which runs on its own kind of GPU alone: statistics, and sums of dq in fp32."""
    (batch, heads, _, d_head), rows = q.shape, -(-q.shape[2] // 128) * 128
    torch.empty(batch * heads * (2 + (64 if d_head <= 64 else 128)) * rows)


ATTENTIONS = {
    "flash": _through(flash_forward.launch_forward, flash_backward.launch_backward),
    "hopper": _through(flash_forward.launch_forward, hopper_backward),
}


def swiglu_product_(gate_up: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    reference.product_(gate_up, x, weight)
    return swiglu._product_like(gate_up)


def unlaunched_ops(attention: str) -> BlockOps:
    return BlockOps(
        rms_norm_forward=rms_norm_forward,
        add_rms_norm_forward=add_rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        product_=reference.product_,
        add_product_=reference.add_product_,
        product_backward=reference.product_backward,
        weight_backward_=reference.weight_backward_,
        swiglu_product_=swiglu_product_,
        swiglu_backward_=lambda *args, **kwargs: None,
        column_sums=reference.column_sums,
        rotate_=lambda *args, **kwargs: None,
        **ATTENTIONS[attention],
    )


def unlaunched_model(
    config: ModelConfig,
    precision: str,
    keep: str,
    attention: str,
    recipe: Recipe = STORED,
    *,
    inputs_on_host: bool = False,
    remember: bool = True,
) -> TransformerLM:
    """With blocks written out; called with targets, it computes its loss."""
    loss_in_chunks = partial(linear_cross_entropy.linear_cross_entropy, chunk=CHUNK)
    ops = replace(REFERENCE_OPS, rms_norm=rms_norm.rms_norm, linear_cross_entropy=loss_in_chunks)
    model = TransformerLM(config, ops, dtype=parameter_dtype(PRECISIONS[precision]))
    products = block_products("fused", recipe, remember=remember)
    write_out(model, unlaunched_ops(attention), keep, products, inputs_on_host=inputs_on_host)
    return model
