"""Clipping by the whole gradient's norm, and steps that are not finite."""

import math

import pytest
import torch
from torch import nn

from cs336_systems.case import TrainingCase
from cs336_systems.training.assemble import build_model, finish, random_batch
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.optimizer import make_optimizer

OPTIMIZERS = ("torch-fused", "fused")
"""The latter in Triton's interpreter, where there is no GPU."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(DEVICE)


def give_gradients(model, factor=1.0):
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator).to(DEVICE)


def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [0.5, 1000.0, math.inf])
def test_clips_as_torch_does(model, name, max_norm):
    optimizer = make_optimizer(name, model.parameters(), lr=0.1, eps=1.0)
    guard = GradientGuard(max_norm)
    begin = copies(model)
    for _ in range(3):
        give_gradients(model)
        guard(model, optimizer)
    got = copies(model)
    for parameter, value in zip(model.parameters(), begin, strict=True):
        parameter.data.copy_(value)
    reference = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0)
    for _ in range(3):
        give_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        reference.step()
    assert guard.norm.item() == pytest.approx(norm.item(), rel=2**-20)
    for value, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(value, parameter.detach(), rtol=2**-18, atol=2**-18)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("halts", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(model, name, halts, bad):
    def trained(factors):
        torch.manual_seed(0)
        for layer in model:
            layer.reset_parameters()
        optimizer = make_optimizer(name, model.parameters(), lr=0.1)
        guard = GradientGuard(1.0, halts=halts)
        norms = []
        for factor in factors:
            give_gradients(model, factor)
            guard(model, optimizer)
            norms.append(guard.norm.item())
        return copies(model), norms

    got, norms = trained([1.0, bad, 2.0])
    expected, _ = trained([1.0] if halts else [1.0, 2.0])
    assert not math.isfinite(norms[1])
    assert math.isfinite(norms[2])
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_matrices_alone_decay():
    case = TrainingCase(size="tiny", batch_size=1, context_length=8, optimizer="torch-fused")
    step = finish(build_model(case), case, guard=GradientGuard(1.0), decay="matrices", weight_decay=0.5, lr=0.1)
    for group, matrices in zip(step.optimizer.param_groups, (True, False), strict=True):
        assert group["weight_decay"] == (0.5 if matrices else 0.0)
        assert all((parameter.dim() > 1) == matrices for parameter in group["params"])
    step(*random_batch(case))
    assert step.guard.norm > 0


def test_what_it_refuses(model):
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        GradientGuard(0.0)
    case = TrainingCase(size="tiny", dtype="autocast-fp16")
    with pytest.raises(ValueError, match="gradients of a scaled loss, as in autocast-fp16, cannot be clipped"):
        finish(build_model(TrainingCase(size="tiny")), case, guard=GradientGuard())
