"""Small blocks with everything that differs between models, and what both ways of running one give."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.blocks import (
    REFERENCE,
    BlockGradients,
    BlockOps,
    BlockWeights,
    Saved,
    backward,
    forward,
    write_out,
)
from cs336_systems.blocks.products import STORED, Products
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS, SWITCHES, kept_names
from cs336_systems.model import TransformerBlock, TransformerLM
from cs336_systems.model.layers import RotaryEmbedding

HANDOUT = ModelConfig("handout", d_model=24, d_ff=40, n_layers=2, n_heads=3, vocab_size=50, context_length=40)
LLAMA = replace(HANDOUT, name="llama", n_heads=6, n_kv_heads=2)
QWEN = replace(HANDOUT, name="qwen", n_heads=4, n_kv_heads=1, qkv_bias=True, rms_norm_eps=1e-6)
QWEN3 = replace(HANDOUT, name="qwen3", n_heads=4, n_kv_heads=2, head_dim=8, qk_norm=True, rms_norm_eps=1e-6)
CONFIGS = (HANDOUT, LLAMA, QWEN, QWEN3)

KEEPS = (
    *LEVELS,
    *(f"all-{switch}" for switch in SWITCHES),
    "products-residual",
    "all-norm-qkv-ffn",
    "all-residual-ffn",
)


@functools.cache
def block_of(config: ModelConfig, dtype: torch.dtype) -> TransformerBlock:
    """The same values in each dtype, biases and gains included."""
    torch.manual_seed(0)
    block = TransformerBlock(config, dtype=torch.float64)
    for name, parameter in block.named_parameters():
        gain = name in ("ln1.weight", "ln2.weight", "attn.q_norm.weight", "attn.k_norm.weight")
        torch.nn.init.normal_(parameter, mean=float(gain), std=0.3)
    return block.to(torch.float32).to(dtype)


def tables(config: ModelConfig, seq_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rotary = RotaryEmbedding(config, dtype=dtype)
    rotary.reset_parameters()
    return rotary(seq_len)


def inputs(config: ModelConfig, seq_len: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, seq_len, config.d_model, generator=generator).to(dtype) for _ in range(2))


@functools.cache
def by_autograd(config: ModelConfig, seq_len: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, and gradients of input and weights, of the reference block."""
    block, (x, dy) = block_of(config, dtype), inputs(config, seq_len, dtype)
    y = block(x.requires_grad_(), *tables(config, seq_len, dtype))
    names, parameters = zip(*block.named_parameters(), strict=True)
    dx, *gradients = torch.autograd.grad(y, (x, *parameters), dy)
    return {"y": y.detach(), "dx": dx, **dict(zip(names, gradients, strict=True))}


def written_out(
    config: ModelConfig,
    seq_len: int,
    dtype: torch.dtype,
    keep: str,
    *,
    device: str = "cpu",
    ops: BlockOps = REFERENCE,
    products: Products = STORED,
    **of_backward: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same by ``forward`` and ``backward``, and what was kept in between.

    Args:
        of_backward: options of ``backward``; gradients are 1 before it accumulates, else NaN.
    """
    parameters = {name: p.detach().to(device) for name, p in block_of(config, dtype).named_parameters()}
    x, dy, *how = (each.to(device) for each in (*inputs(config, seq_len, dtype), *tables(config, seq_len, dtype)))
    weights, saved = BlockWeights.of(parameters), Saved(kept_names(keep, quantized=products.quantized))
    grads = BlockGradients.empty(parameters, parameters)
    accumulates = of_backward.get("accumulate", False)
    for gradient in grads.by_parameter(parameters).values():
        gradient.fill_(1.0 if accumulates else float("nan"))
    y = forward(x, weights, saved, ops, config, *how, products=products)
    kept = dict(saved.tensors)
    dx = backward(dy, weights, saved, grads, ops, config, *how, products=products, **of_backward)
    for work in of_backward.get("later") or ():
        work(grads, accumulates)
    return {"y": y, "dx": dx, **grads.by_parameter(parameters)}, kept


def written_out_model(
    config: ModelConfig, keep: str = "products", products: Products = STORED, *, on_host: bool = False, **placement: Any
) -> TransformerLM:
    """A model of seed 0 with its blocks written out."""
    torch.manual_seed(0)
    model = TransformerLM(config, **placement)
    write_out(model, REFERENCE, keep, products, inputs_on_host=on_host)
    return model


IDS = torch.arange(4 * 9).view(4, 9) * 7 % 50


def loss_of(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    """Each token's loss as a prediction of itself."""
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
