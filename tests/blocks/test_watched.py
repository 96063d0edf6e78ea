"""What quantization did to each tensor of a block: as counted by hand, and the step learns the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import REFERENCE, write_out
from cs336_systems.blocks.maxima import FoundMaxima
from cs336_systems.blocks.quantized import ACTIVATIONS, GRADIENTS
from cs336_systems.blocks.watched import WatchedProducts, watching
from cs336_systems.kernels.quantize_reference import dequantize
from cs336_systems.model import REFERENCE_OPS, TransformerLM

from .test_quantized import RECIPES, SMALL, products_of

WEIGHTS = ("qkv weight", "output weight", "gate_up weight", "down weight")


def model_of(recipe, keep="products", **how):
    torch.manual_seed(0)
    model = TransformerLM(SMALL, REFERENCE_OPS, dtype=torch.bfloat16)
    write_out(model, REFERENCE, keep, products_of(recipe, remember=True))
    return model


def gradients(model: TransformerLM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SMALL.vocab_size, (2, 16), generator=generator)
    torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("recipe", "keep"), [("tensor", "input"), *((name, "products") for name in RECIPES)])
def test_a_step_that_is_watched_is_the_same_step(recipe, keep):
    expected = gradients(model_of(RECIPES[recipe], keep))
    model = model_of(RECIPES[recipe], keep)
    before = [block.products for block in model.layers]
    with watching(model) as watched:
        got = gradients(model)
    assert all(map(torch.equal, got, expected))
    assert [block.products for block in model.layers] == before
    for one in watched:
        assert set(one.found) == {*ACTIVATIONS, *GRADIENTS, *WEIGHTS}
        for name, (absmax, zeroed, cut_off, numel) in ((name, each.tolist()) for name, each in one.found.items()):
            assert absmax > 0 and 0 <= zeroed < numel and cut_off == 0, name
        assert one.found["down weight"][3] == SMALL.d_model * SMALL.d_ff


def test_blocks_that_are_not_quantized_are_passed_over_and_weights_are_seen_again():
    model = model_of(replace(RECIPES["tensor"], skip_first=1))
    for _ in range(2):  # whose weights are remembered the second time
        with watching(model) as watched:
            gradients(model)
        assert [one.block for one in watched] == [1, 2, 3]
        assert all(name in one.found for one in watched for name in WEIGHTS)


@pytest.mark.parametrize("columns_alone", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_are_those_of_all_elements(monkeypatch, recipe, columns_alone):
    monkeypatch.setattr("cs336_systems.blocks.watched._AT_ONCE", 1000)
    torch.manual_seed(0)
    x = (torch.randn(64, 160) * torch.randn(64, 160).mul(4).exp()).bfloat16()
    x[3], x[:, 5] = 0.0, 0.0
    watch = WatchedProducts(products_of(RECIPES[recipe]), 0)
    operand = watch.read("normed1", x, watch.maxima(x), rows=not columns_alone)
    read, seen = (operand.columns, x.T) if columns_alone else (operand.rows, x)
    again = dequantize(read.values, read.scale)
    zeroed = int(((again == 0) & (seen != 0)).sum())
    assert 0 < zeroed < x.numel()
    assert watch.found["normed1"].tolist() == [x.abs().max().item(), zeroed, 0, x.numel()]
    watch.read("normed1", x, watch.maxima(x), rows=not columns_alone)
    assert watch.found["normed1"].tolist() == [x.abs().max().item(), 2 * zeroed, 0, 2 * x.numel()]


def test_a_scale_that_is_too_small_cuts_off():
    x = torch.linspace(-1, 1, 32 * 16).view(32, 16)
    watch = WatchedProducts(products_of(RECIPES["tensor"]), 0)
    maxima = FoundMaxima(torch.tensor([0.5]), ["dy"], watch.quantizers, known=True)
    watch.read_gradient("dy", x, maxima)
    assert watch.found["dy"][2] == (x.abs() > 0.5).sum() > 0
