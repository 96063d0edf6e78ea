"""Kernels in the places of the reference operations, where Triton's interpreter or a GPU can run them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import block_ops, head_ops, write_out
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from tests.modes import Mode

from .cases import by_autograd, written_out

CONFIG = ModelConfig(
    "sixteen", d_model=32, d_ff=48, n_layers=1, n_heads=2, n_kv_heads=1, qkv_bias=True, context_length=40
)
QK_NORM = replace(CONFIG, name="qk norm", head_dim=32, qkv_bias=False, qk_norm=True)

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CPU = pytest.param(
    "cpu", marks=[pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them instead")]
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, QK_NORM], ids=lambda config: config.name)
@pytest.mark.parametrize("device", [CUDA, CPU])
def test_kernels_fit(device, config):
    """fp32, no worse than the reference block, and the same bits at every level."""
    levels = LEVELS if device == "cuda" else ("input", "all")
    how = {"device": device, "ops": block_ops("fused", "flash")}
    results = [written_out(config, 33, torch.float32, level, **how)[0] for level in levels]
    exact, eager = (by_autograd(config, 33, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in exact.items():
        assert all(torch.equal(result[name], results[0][name]) for result in results), name
        error, budget = ((t[name].cpu() - value).abs().max().item() for t in (results[0], eager))
        assert error <= 2 * budget + 8 * torch.finfo(torch.float32).eps * value.abs().max().item(), (
            name,
            error,
            budget,
        )


class _Asked(Mode):
    """The last argument of each operator."""

    def __init__(self):
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(args[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("deterministic", [False, True])
def test_hopper_sums_in_one_order_if_it_is_asked_to(deterministic):
    ops = block_ops("fused", "hopper", deterministic=deterministic)
    heads: list[Tensor] = [torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="meta") for _ in range(8)]
    do, q, k, v, o, *gradients = heads
    with _Asked() as asked:
        ops.attention_backward(do, q, k, v, o, q.new_empty(1, 2, 8, dtype=torch.float32), tuple(gradients))
    assert asked.found[-1] is deterministic


@pytest.mark.slow
@pytest.mark.parametrize("device", [CUDA, CPU])
def test_a_model_of_kernels_fits(device):
    """Loss and gradients of a whole model, its final norm, head and tied embedding included, as the reference's."""
    config = replace(CONFIG, tie_embeddings=True, vocab_size=50)
    torch.manual_seed(0)
    exact = TransformerLM(config, dtype=torch.float64)
    eager, ours = (TransformerLM(config, ops) for ops in (REFERENCE_OPS, head_ops("fused", REFERENCE_OPS)))
    for model in (eager, ours):
        model.load_state_dict(exact.state_dict())
    write_out(ours, block_ops("fused", "flash"), "products")
    ids = torch.randint(config.vocab_size, (2, 20))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    found = []
    for model in (exact, eager, ours.to(device)):
        here = next(model.parameters()).device
        loss = model(ids.to(here), targets.to(here))
        gradients = torch.autograd.grad(loss, tuple(model.parameters()))
        found.append([tensor.double().cpu() for tensor in (loss, *gradients)])
    for name, true, plain, mine in zip(["loss", *dict(exact.named_parameters())], *found, strict=True):
        error, budget = ((t - true).abs().max().item() for t in (mine, plain))
        rounding = 8 * torch.finfo(torch.float32).eps * true.abs().max().item()
        assert error <= 2 * budget + rounding, (name, error, budget)
