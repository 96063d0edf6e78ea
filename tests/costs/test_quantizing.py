"""What quantizing moves by arithmetic is what a block asks its quantizers to move."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from cs336_systems.blocks import (
    REFERENCE,
    BlockGradients,
    BlockWeights,
    QuantizedProducts,
    Saved,
    backward,
    block_products,
    forward,
)
from cs336_systems.config import MODEL_SIZES, Recipe
from cs336_systems.costs.kept import kept_names
from cs336_systems.costs.quantizing import quantizing_bytes, quantizing_weights_bytes
from tests.blocks.cases import QWEN, block_of, inputs, tables

CONFIG = replace(QWEN, d_model=32, d_ff=48, n_heads=4, n_kv_heads=2, context_length=16)
E = 4
"""Bytes of fp32."""


def noting(operation, result):
    """The operation as a kernel that notes the largest magnitude of one of its results."""

    def run(*arguments, absmax=None, **how):
        found = operation(*arguments, **how)
        if absmax is not None:
            absmax.copy_(result(arguments, found).abs().max())
        return found

    return run


class Counted:
    """Reference quantizers and operations that note magnitudes, and the bytes that quantizers move, by pass."""

    def __init__(self):
        products = block_products("reference", Recipe("e4m3"), remember=True)
        assert isinstance(products, QuantizedProducts)
        self.reference, self.moved = products.quantizers, Counter()
        quantizers = replace(
            self.reference,
            absmax=self.absmax,
            quantize=self.quantize,
            swiglu=noting(self.reference.swiglu, lambda arguments, found: found),
            swiglu_backward=self.swiglu_backward,
            raised=True,
        )
        self.products = QuantizedProducts(products.recipe, quantizers, remember=True)
        self.ops = replace(
            REFERENCE,
            rms_norm_forward=noting(REFERENCE.rms_norm_forward, lambda arguments, found: found[0]),
            add_rms_norm_forward=noting(REFERENCE.add_rms_norm_forward, lambda arguments, found: found[1]),
            rms_norm_backward=noting(REFERENCE.rms_norm_backward, lambda arguments, found: found[0]),
            rotate_=noting(REFERENCE.rotate_, lambda arguments, found: arguments[0]),
        )

    def absmax(self, x):
        self.moved["absmax"] += E * x.numel()
        return self.reference.absmax(x)

    def quantize(self, x, *arguments, rows, transposed, **how):
        self.moved["quantize"] += (E + rows + transposed) * x.numel()
        return self.reference.quantize(x, *arguments, rows=rows, transposed=transposed, **how)

    def swiglu_backward(self, dz, gate_up, absmax, dtype, *, transposed, z_absmax=None, z_dtype=None):
        """Both passes read dz, gate and up; what ``swiglu_backward_`` would move is not quantization's."""
        n, again = dz.numel(), z_absmax is not None
        self.moved["swiglu"] += 2 * 3 * E * n + (1 + transposed) * 2 * n + again * n
        self.moved["swiglu"] -= (3 + 2 + again) * E * n
        REFERENCE.swiglu_backward_(dz, gate_up, with_product=again)
        absmax.copy_(gate_up.abs().max())
        quantize = self.reference.quantize
        product = quantize(dz, z_absmax, z_dtype, rows=False, transposed=True) if again else None
        return quantize(gate_up, absmax, dtype, rows=True, transposed=transposed), product


@pytest.mark.parametrize("keep", ["products", "all", "all-norm", "all-swiglu"])
def test_a_block_moves_what_is_predicted(keep):
    counted, dtype = Counted(), torch.float32
    parameters, (x, dy) = dict(block_of(CONFIG, dtype).named_parameters()), inputs(CONFIG, 16, dtype)
    weights, saved = BlockWeights.of(parameters), Saved(kept_names(keep, quantized=True))
    grads = BlockGradients.empty(parameters, parameters)
    how = counted.ops, CONFIG, *tables(CONFIG, 16, dtype)
    counted.products.at(list(parameters.values()))
    for name in ("qkv", "output", "gate_up", "down"):
        counted.products.read_weight(name, getattr(weights, name), rows=True)
    of_weights = counted.moved.pop("quantize")
    assert of_weights == quantizing_weights_bytes(CONFIG, E)
    del counted.moved["absmax"]  # the optimizer has them, in training
    forward(x, weights, saved, *how, products=counted.products)
    backward(dy, weights, saved, grads, *how, products=counted.products)
    assert counted.moved.total() == x.shape[0] * x.shape[1] * sum(quantizing_bytes(CONFIG, keep, E).values())


def test_what_is_computed_again_is_not_counted():
    with pytest.raises(ValueError, match="keep attention computes gate_up, qkv, residual again"):
        quantizing_bytes(CONFIG, "attention")


def test_kept_norms_are_read_once_and_a_kept_product_saves_bf16_more():
    config = MODEL_SIZES["qwen2.5-7b"]
    kept, again = (quantizing_bytes(config, keep) for keep in ("all", "products"))
    assert again["normed1"] - kept["normed1"] == 2 * config.d_model
    assert (kept["dgate_up"], again["dgate_up"]) == (6 * config.d_ff, 5 * config.d_ff)
    assert sum(again.values()) == 30 * config.d_model + 8 * config.d_ff + 4 * (config.d_model + 2 * config.d_kv)
