"""A gradient that goes from block to block brings its largest magnitude along, and loses it to who changes it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import REFERENCE, QuantizedProducts, block_products, write_out
from cs336_systems.blocks.maxima import FoundMaxima, FusedQuantizers
from cs336_systems.config import Recipe
from cs336_systems.model import REFERENCE_OPS, TransformerLM

from .test_quantized import SMALL


def noting(operation, result):
    """The operation as a kernel that notes the largest magnitude of one of its results."""

    def run(*arguments, absmax=None, **how):
        found = operation(*arguments, **how)
        if absmax is not None:
            absmax.copy_(result(arguments, found).abs().max())
        return found

    return run


class Reads:
    """Reference operations and quantizers that note magnitudes, and the tensors that were read for theirs."""

    def __init__(self) -> None:
        products = block_products("reference", Recipe("e4m3"), remember=True)
        assert isinstance(products, QuantizedProducts)
        self.reference, self.read = products.quantizers, list[Tensor]()
        fused = FusedQuantizers(
            self.norm_absmax,
            lambda x, branch, gain, eps, absmax=None: (x + branch, self.norm_absmax(x + branch, gain, eps, absmax)),
            self.norm_quantize,
            lambda gate_up: torch.empty(0),
            self.swiglu_backward,
        )
        replaced = {"absmax": self.absmax, "swiglu": self.swiglu, "raised": True, "fused": fused}
        self.products = QuantizedProducts(products.recipe, replace(self.reference, **replaced), remember=True)
        self.ops = replace(
            REFERENCE,
            rms_norm_forward=noting(REFERENCE.rms_norm_forward, lambda arguments, found: found[0]),
            add_rms_norm_forward=noting(REFERENCE.add_rms_norm_forward, lambda arguments, found: found[1]),
            rms_norm_backward=noting(REFERENCE.rms_norm_backward, lambda arguments, found: found[0]),
            rotate_=noting(REFERENCE.rotate_, lambda arguments, found: arguments[0]),
            swiglu_backward_=noting(REFERENCE.swiglu_backward_, lambda arguments, found: arguments[1]),
        )

    def absmax(self, x: Tensor) -> Tensor:
        self.read.append(x.detach().clone())
        return self.reference.absmax(x)

    def swiglu(self, gate_up, *, absmax, slopes=None):
        product = self.reference.swiglu(gate_up)
        absmax.copy_(product.abs().max())
        return product

    def norm_absmax(self, x, gain, eps, absmax=None):
        normed, rstd = REFERENCE.rms_norm_forward(x, gain, eps)
        if absmax is not None:
            absmax.copy_(normed.abs().max())
        return rstd

    def norm_quantize(self, x, gain, rstd, absmax, dtype, **kept):
        return self.reference.quantize(x * rstd[:, None] * gain, absmax, dtype, **kept)

    def swiglu_backward(self, dz, gate_up, slopes, absmax, dtype, *, transposed, z_absmax=None, z_dtype=None):
        again = z_absmax is not None
        REFERENCE.swiglu_backward_(dz, gate_up, with_product=again)
        absmax.copy_(gate_up.abs().max())
        quantize = self.reference.quantize
        product = quantize(dz, z_absmax, z_dtype, rows=False, transposed=True) if again else None
        return quantize(gate_up, absmax, dtype, rows=True, transposed=transposed), product


def backward_of(change: Callable[[Tensor], Tensor | None] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of all parameters, and what was read for its largest magnitude in backward.

    Args:
        change: a hook on the gradient that block 1 hands to block 0.
    """
    torch.manual_seed(0)
    reads, model = Reads(), TransformerLM(SMALL, REFERENCE_OPS)
    write_out(model, reads.ops, "all", reads.products)
    if change is not None:
        model.layers[0].register_forward_hook(lambda module, inputs, output: output.register_hook(change) and None)
    ids = torch.arange(2 * 16).view(2, 16) * 7 % SMALL.vocab_size

    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    reads.read.clear()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], reads.read


def doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


def doubled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


@pytest.mark.parametrize("change", [None, doubled, doubled_in_place])
def test_only_the_last_block_reads_its_gradient_for_its_magnitude_and_one_that_a_hook_changes(monkeypatch, change):
    gradients, read = backward_of(change)
    with monkeypatch.context() as patch:
        patch.setattr(FoundMaxima, "hand_on", lambda self, dx: None)
        expected, read_without = backward_of(change)
    assert (len(read), len(read_without)) == (1 if change is None else 2, SMALL.n_layers)
    assert torch.equal(read[0], read_without[0])
    assert change is None or torch.equal(read[1], read_without[-1])
    assert all(map(torch.equal, gradients, expected))
