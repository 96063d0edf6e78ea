"""Bytes that a block asks its quantizers to move, beyond what a block in the stored dtype moves."""

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
from cs336_systems.blocks.maxima import FusedQuantizers
from cs336_systems.config import Recipe
from cs336_systems.costs.kept import kept_names
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
            swiglu=self.swiglu,
            raised=True,
            fused=FusedQuantizers(
                self.norm_absmax,
                self.add_norm_absmax,
                self.norm_quantize,
                lambda gate_up: torch.empty(0),
                self.swiglu_backward,
            ),
        )
        self.products = QuantizedProducts(products.recipe, quantizers, remember=True)
        self.ops = replace(
            REFERENCE,
            rms_norm_forward=noting(REFERENCE.rms_norm_forward, lambda arguments, found: found[0]),
            add_rms_norm_forward=noting(REFERENCE.add_rms_norm_forward, lambda arguments, found: found[1]),
            rms_norm_backward=noting(REFERENCE.rms_norm_backward, lambda arguments, found: found[0]),
            rotate_=noting(REFERENCE.rotate_, lambda arguments, found: arguments[0]),
        )

    def swiglu(self, gate_up, *, absmax, slopes=None):
        product = self.reference.swiglu(gate_up)
        absmax.copy_(product.abs().max())
        return product

    def absmax(self, x):
        self.moved["absmax"] += E * x.numel()
        return self.reference.absmax(x)

    def quantize(self, x, *arguments, rows, transposed, **how):
        self.moved["quantize"] += (E + rows + transposed) * x.numel()
        return self.reference.quantize(x, *arguments, rows=rows, transposed=transposed, **how)

    def norm_absmax(self, x, gain, eps, absmax):
        """Its result is not stored, as in bf16 it is."""
        self.moved["norm"] -= E * x.numel()
        normed, rstd = REFERENCE.rms_norm_forward(x, gain, eps)
        absmax.copy_(normed.abs().max())
        return rstd

    def add_norm_absmax(self, x, branch, gain, eps, absmax):
        return x + branch, self.norm_absmax(x + branch, gain, eps, absmax)

    def norm_quantize(self, x, gain, rstd, absmax, dtype, *, rows, transposed):
        """In backward, of a norm that bf16 computes and stores again."""
        if not rows:
            self.moved["norm"] -= 2 * E * x.numel()
        self.moved["norm"] += (E + rows + transposed) * x.numel()
        return self.reference.quantize(x * rstd[:, None] * gain, absmax, dtype, rows=rows, transposed=transposed)

    def swiglu_backward(self, dz, gate_up, slopes, absmax, dtype, *, transposed, z_absmax=None, z_dtype=None):
        """Both passes read dz, one gate and up; what ``swiglu_backward_`` would move is not quantization's."""
        n, again = dz.numel(), z_absmax is not None
        self.moved["swiglu"] += (1 + 3) * E * n + (1 + transposed) * 2 * n + again * n
        self.moved["swiglu"] -= (3 + 2 + again) * E * n
        REFERENCE.swiglu_backward_(dz, gate_up, with_product=again)
        absmax.copy_(gate_up.abs().max())
        quantize = self.reference.quantize
        product = quantize(dz, z_absmax, z_dtype, rows=False, transposed=True) if again else None
        return quantize(gate_up, absmax, dtype, rows=True, transposed=transposed), product


@pytest.mark.parametrize(
    ("keep", "norms", "feed_forward"),
    [("products", -2 * E + 4, 6 - E), ("all", 4, 6), ("all-norm", -2 * E + 4, 6), ("all-swiglu", 4, 6 - E)],
)
def test_a_block_moves_a_byte_for_each_way_in_which_a_tensor_is_stored(keep, norms, feed_forward):
    """Widths are bytes of a token: two norms, attention's output and the gradients of both branches as wide as the
    model, q | k | v, and SwiGLU with its gradient. Norms that backward recomputes cost bf16 as much or more."""
    counted, dtype = Counted(), torch.float32
    parameters, (x, dy) = dict(block_of(CONFIG, dtype).named_parameters()), inputs(CONFIG, 16, dtype)
    weights, saved = BlockWeights.of(parameters), Saved(kept_names(keep, quantized=True))
    grads = BlockGradients.empty(parameters, parameters)
    how = counted.ops, CONFIG, *tables(CONFIG, 16, dtype)
    counted.products.at(list(parameters.values()))
    for name in ("qkv", "output", "gate_up", "down"):
        counted.products.read_weight(name, getattr(weights, name), rows=True)
    d, d_qkv, d_ff = CONFIG.d_model, CONFIG.d_qkv, CONFIG.d_ff
    assert counted.moved.pop("quantize") == (E + 2) * (d_qkv * d + d * d + 3 * d_ff * d)
    above = counted.products.gradient_maxima(dy)
    above.of("dx", dy)
    above.hand_on(dy)
    del counted.moved["absmax"]  # in training the optimizer has those of weights, the block above that of dy
    forward(x, weights, saved, *how, products=counted.products)
    backward(dy, weights, saved, grads, *how, products=counted.products)
    attended, gradients = 3 * E + 2, 2 * (E + 2)
    per_token = (norms + attended + gradients) * d + (E + 2) * d_qkv + feed_forward * d_ff
    assert counted.moved.total() == x.shape[0] * x.shape[1] * per_token
