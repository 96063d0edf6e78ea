"""Clipping by the whole gradient's norm, and steps that are not finite."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES
from cs336_systems.ranks import Parallel
from cs336_systems.training.assemble import build_model, finish, random_batch
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.parallel import make_parallel_optimizer, wrap
from cs336_systems.training.step import TrainStep, cross_entropy
from tests.distributed.checks import on_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TINIEST = replace(MODEL_SIZES["tiny"], d_model=16, d_ff=32, n_layers=1, vocab_size=31, context_length=8)


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


@pytest.mark.parametrize(("name", "max_norm"), [("torch-fused", 0.5), ("torch-fused", math.inf), ("fused", 0.5)])
def test_clips_as_torch_does(model, name, max_norm):
    """The fused one in Triton's interpreter, where there is no GPU."""
    optimizer = make_parallel_optimizer(name, model, Parallel(), lr=0.1, eps=1.0)
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


@pytest.mark.parametrize(("name", "bad"), [("torch-fused", math.nan), ("fused", math.inf)])
def test_a_gradient_that_is_not_finite_and_later_ones_change_nothing(model, name, bad):
    def trained(factors):
        torch.manual_seed(0)
        for layer in model:
            layer.reset_parameters()
        optimizer = make_parallel_optimizer(name, model, Parallel(), lr=0.1)
        guard = GradientGuard(1.0)
        norms = []
        for factor in factors:
            give_gradients(model, factor)
            guard(model, optimizer)
            norms.append(guard.norm.item())
        return copies(model), norms

    got, norms = trained([1.0, bad, 2.0])
    expected, _ = trained([1.0])
    assert not math.isfinite(norms[1])
    assert math.isfinite(norms[2])
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize(("name", "bad"), [("torch-fused", math.inf), ("fused", math.nan)])
def test_a_loss_alone_that_is_not_finite_changes_nothing(model, name, bad):
    optimizer = make_parallel_optimizer(name, model, Parallel(), lr=0.1)
    guard = GradientGuard(1.0)
    seen = []
    for loss in (1.5, bad, 2.5):
        give_gradients(model)
        guard(model, optimizer, torch.tensor(loss, device=DEVICE))
        assert math.isfinite(guard.norm)
        assert str(guard.loss.item()) == str(loss)
        seen.append(copies(model))
    one, two, three = seen
    assert all(map(torch.equal, one, two))
    assert all(map(torch.equal, two, three))


def one_bad_loss(rank, placements):
    """What the first rank's loss alone does to each rank's weights: whether they moved in each step; and the losses."""
    found = []
    for parallel in placements:
        case = replace(TrainingCase.of(TINIEST, batch_size=1, optimizer="torch-fused"), seed=rank.rank)
        torch.manual_seed(0)
        model = wrap(build_model(case), parallel, rank)
        optimizer = make_parallel_optimizer(case.optimizer, model, parallel, lr=0.1)
        step = TrainStep(model, optimizer, case.precision, guard=GradientGuard())
        for bad in (0.0, math.inf, 0.0):
            more = bad if rank.rank == 0 else 0.0
            step.loss_function = lambda *batch, more=more: cross_entropy(*batch) + more
            before = copies(step.model)
            step(*random_batch(case))
            moved = not all(map(torch.equal, before, copies(step.model)))
            found.append((moved, step.guard.loss.item(), step.guard.norm.item()))
    return found


@pytest.mark.slow
def test_all_ranks_pass_over_a_step_whose_loss_is_not_finite_on_one():
    placements = [Parallel("bucketed"), Parallel(optimizer_state="scattered")]
    one, other = on_ranks(one_bad_loss, 2, placements)
    assert one == other
    for i in range(0, len(one), 3):
        assert [moved for moved, _, _ in one[i : i + 3]] == [True, False, False]
        assert [math.isfinite(loss) for _, loss, _ in one[i : i + 3]] == [True, False, True]
    assert all(math.isfinite(norm) for _, _, norm in one)


def test_matrices_alone_decay():
    case = TrainingCase(size="tiny", batch_size=1, context_length=8, optimizer="torch-fused")
    step = finish(build_model(case), case, guard=GradientGuard(1.0), decay="matrices", weight_decay=0.5, lr=0.1)
    for group, matrices in zip(step.optimizer.param_groups, (True, False), strict=True):
        assert group["weight_decay"] == (0.5 if matrices else 0.0)
        assert all((parameter.dim() > 1) == matrices for parameter in group["params"])
    step(*random_batch(case))
    assert step.guard.norm > 0


def test_what_it_refuses():
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        GradientGuard(0.0)
