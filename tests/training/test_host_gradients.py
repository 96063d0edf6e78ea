"""Steps that keep states, gradients or blocks' inputs in host memory, beside those that do not: the same bits.

But gradients of several micro-batches: on the device blocks' products add to them, and here autograd's sum is rounded.
"""

import copy
from dataclasses import replace

import pytest
import torch

from cs336_systems.config import ModelConfig
from cs336_systems.kernels.grad_norm import grad_norm
from cs336_systems.training import TrainingCase, host_states
from cs336_systems.training.assemble import build_model, finish, random_batch
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.host_states import HostGradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig("two", 8, 16, 2, 1, vocab_size=24, context_length=8, tie_embeddings=True)
BASE = {"device": DEVICE, "batch_size": 1, "optimizer": "fused", "keep": "input", "accumulate": 3}


def steps(config=CONFIG, **fields):
    """Of five steps: losses, norms, weights and moments."""
    case = TrainingCase.of(config, **BASE | fields)
    guard = GradientGuard(0.5)
    step = finish(build_model(case), case, guard=guard, decay="matrices", lr=0.01)
    found = []
    for seed in range(5):
        batch = random_batch(TrainingCase.of(config, **BASE | fields, seed=seed))
        found += [step(*batch), guard.norm.clone()]
        assert all(parameter.grad is None for parameter in step.model.parameters())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    states = [state for parameter in step.model.parameters() for state in step.optimizer.state[parameter].values()]
    return [tensor.cpu() for tensor in (*found, *step.model.parameters(), *states)]


@pytest.fixture(scope="module")
def on_the_device():
    return {accumulate: steps(accumulate=accumulate) for accumulate in (1, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["m", "gradients-residual", "m-v-gradients-residual"])
def test_steps_are_the_same_bits(on_the_device, offload, monkeypatch):
    monkeypatch.setattr(host_states, "BATCH_ELEMENTS", 192)
    assert all(map(torch.equal, steps(offload=offload, accumulate=1), on_the_device[1]))
    found = steps(offload=offload)
    assert offload != "m" or all(map(torch.equal, found, on_the_device[3]))
    for own, other in zip(found, on_the_device[3], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["gradients", "master-m-v-gradients-residual"])
def test_steps_in_bf16_with_masters_are_the_same_bits(offload, monkeypatch):
    monkeypatch.setattr(host_states, "BATCH_ELEMENTS", 512)
    config = replace(CONFIG, d_model=32, d_ff=64, n_heads=2)  # flash has heads of 16 and more
    fields = {"dtype": "bf16", "master": "fp32", "attention": "flash", "kernels": "fused", "accumulate": 1}
    assert all(map(torch.equal, steps(config, offload=offload, **fields), steps(config, **fields)))


@pytest.mark.slow
def test_gradients_of_several_backwards_add_up_on_the_host_and_so_does_their_norm():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(30, 30, device=DEVICE) for _ in range(4)))
    away = copy.deepcopy(plain)
    unused = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    host = HostGradients([*away.parameters(), unused])
    for _ in range(2):
        for _ in range(3):
            x = torch.randn(5, 30, device=DEVICE)
            for model in (plain, away):
                model(x).square().sum().backward()
        for parameter, twin in zip(plain.parameters(), away.parameters(), strict=True):
            assert twin.grad is None
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            assert torch.equal(host.of(twin), parameter.grad.cpu())
        assert torch.equal(host.norm(), grad_norm([parameter.grad for parameter in plain.parameters()]))
        assert host.of(unused) is None
        host.forget()
        plain.zero_grad()
        assert host.of(twin) is None
        assert host.tensors() == []
