"""Kernels in the places of the reference operations, where Triton's interpreter or a GPU can run them."""

import pytest
import torch

from cs336_systems.blocks import BlockGradients, BlockWeights, Saved, backward, forward
from cs336_systems.blocks.attention import FLASH_ATTENTION
from cs336_systems.blocks.fused import fused
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS, kept_names

from .cases import block_of, by_autograd, inputs, tables

CONFIG = ModelConfig(
    "sixteen", d_model=64, d_ff=96, n_layers=1, n_heads=4, n_kv_heads=2, qkv_bias=True, context_length=40
)
KERNELS = fused(FLASH_ATTENTION)

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
CPU = pytest.param(
    "cpu", marks=[pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them instead")]
)


@pytest.mark.parametrize("device", [CUDA, CPU])
def test_kernels_fit(device):
    """fp32, no worse than the reference block, and the same bits at every level."""
    parameters = {name: p.detach().to(device) for name, p in block_of(CONFIG, torch.float32).named_parameters()}
    x, dy, cos, sin = (t.to(device) for t in (*inputs(CONFIG, 33, torch.float32), *tables(CONFIG, 33, torch.float32)))
    results = []
    for level in LEVELS:
        weights, saved = BlockWeights.of(parameters), Saved(kept_names(level))
        grads = BlockGradients.empty(parameters, parameters)
        y = forward(x, weights, saved, KERNELS, CONFIG, cos, sin)
        dx = backward(dy, weights, saved, grads, KERNELS, CONFIG, cos, sin)
        results.append({"y": y, "dx": dx, **grads.by_parameter(parameters)})
    exact, eager = (by_autograd(CONFIG, 33, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in exact.items():
        assert all(torch.equal(result[name], results[0][name]) for result in results), name
        error, budget = ((t[name].cpu() - value).abs().max().item() for t in (results[0], eager))
        assert error <= 2 * budget + 8 * torch.finfo(torch.float32).eps * value.abs().max().item(), (
            name,
            error,
            budget,
        )
