"""torchao's layers in place of torch's: emulated on a CPU, and said where they are not installed."""

import sys

import pytest
import torch
from torch import nn

from cs336_systems.case import Unsupported
from cs336_systems.experiments.fp8.torchao_layers import with_float8


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


def test_a_library_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Unsupported, match=r"^torchao is not there \(.*\): uv sync, or pip install torchao$"):
        with_float8(nn.Linear(16, 16), "rowwise")
