"""``benchmark_fp8``: its refusals, ways on a CPU, where matmuls are emulated, and torchao's layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cs336_systems.experiments.block_measure import measure_fp8, with_float8
from cs336_systems.experiments.fp8 import Options, make_cells

TINY = replace(Options.default("cpu"), context_length=(16,), steps=1)


def test_what_cannot_be_asked_is_told():
    for fault, message in (
        ({"context_length": (15,)}, "--how e4m3: .* has 15"),
        ({"attention": "hopper"}, "--attention hopper needs --device cuda, got cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            make_cells(replace(TINY, **fault))


@pytest.mark.slow
def test_gradients_of_quantized_blocks_point_where_exact_ones_do():
    for cell in make_cells(replace(TINY, how=("stored", "e4m3"))):
        found = {metric.name: metric.samples for metric in measure_fp8(cell)}
        assert found["step"] == pytest.approx([sum(ms) for ms in zip(found["forward"], found["backward"], strict=True)])
        if cell.how == "stored":
            assert 1 + 1e-12 >= found["least_cosine"][0] > 0.999999
        else:
            assert 0.98 <= found["least_cosine"][0] < 0.999999


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_layers_are_replaced_in_place_and_products_quantized(recipe):
    pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 64), torch.randn(16, 32)
    expected = layer(x)
    block = nn.Sequential(layer, nn.Embedding(16, 16))
    assert with_float8(block, recipe) is block
    assert block[0].weight is layer.weight and block[0].bias is layer.bias
    assert type(block[1]) is nn.Embedding
    found = block[0](x)
    off = (found - expected).norm() / expected.norm()
    assert 2**-9 < off < 2**-3  # e4m3 rounds an element by up to 2^-4
    found.sum().backward()
    assert layer.weight.grad is not None
