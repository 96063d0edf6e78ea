"""Micro-batches: their gradients are that of the whole batch, in one place, and are sent once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.config import MODEL_SIZES, phase_of
from cs336_systems.training import TrainingCase, TrainStep, assemble, random_batch

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, vocab_size=97, context_length=16)
WHOLE = TrainingCase.of(CONFIG, batch_size=12)


def passes(step: TrainStep, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients before the optimizer."""
    for name, phase in step.phases("step", *batch).items():
        if name != "optimizer":
            phase()
    return [parameter.grad for parameter in step.model.parameters()]


def in_parts(n: int, **fields: object) -> TrainingCase:
    return replace(WHOLE, batch_size=12 // n, accumulate=n, **fields)


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, exact, strict=True))


def test_a_step_has_the_same_tokens_however_it_is_cut():
    assert {in_parts(n).tokens_per_step for n in (1, 2, 3)} == {12 * 16}
    assert all(torch.equal(random_batch(in_parts(3))[i], random_batch(WHOLE)[i]) for i in (0, 1))


@pytest.mark.parametrize("n", [2, 3, 12])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("keep", ["autograd", "products"])
def test_gradients_and_loss_are_those_of_the_whole_batch(n, tied, keep):
    """Against fp64, within twice the error of the whole batch in fp32 and n roundings of the largest gradient."""
    size = replace(CONFIG, tie_embeddings=tied)
    whole, parts, oracle = (assemble(replace(case, size=size, keep=keep)) for case in (WHOLE, in_parts(n), WHOLE))
    oracle.model.double()
    batch = random_batch(WHOLE)
    exact, at_once, added = (passes(step, batch) for step in (oracle, whole, parts))
    largest = max(gradient.abs().max().item() for gradient in exact)
    budget = 2 * error(at_once, exact) + n * 2**-24 * largest
    print(f"whole {error(at_once, exact):.1e}, added {error(added, exact):.1e}, allowed {budget:.1e}")
    assert error(added, exact) <= budget
    assert parts.loss is not None and not parts.loss.requires_grad
    assert abs(parts.loss.item() - oracle.loss.item()) <= 2 * abs(whole.loss.item() - oracle.loss.item()) + n * 2**-22


def test_a_mean_of_bf16_gradients_is_that_of_the_whole_batch():
    """In fp64 of each micro-batch's bf16 gradients; n - 1 sums and one halving or so round to 2^-8 each."""
    step = assemble(in_parts(4, dtype="bf16"))
    added = [gradient.double() for gradient in passes(step, random_batch(WHOLE))]
    step.optimizer.zero_grad()
    alone = replace(in_parts(4, dtype="bf16"), accumulate=1)
    single = assemble(alone)
    single.model.load_state_dict(step.model.state_dict())
    means = [torch.zeros_like(gradient) for gradient in added]
    for part in zip(*(tensor.chunk(4) for tensor in random_batch(WHOLE)), strict=True):
        for mean, gradient in zip(means, passes(single, part), strict=True):
            mean += gradient.double() / 4
        single.optimizer.zero_grad()
    largest = max(mean.abs().max().item() for mean in means)
    assert error(added, means) <= 4 * 2**-8 * largest


def test_gradients_add_up_where_the_first_backward_put_them():
    step = assemble(in_parts(3))
    places = []
    for name, phase in step.phases("step", *random_batch(WHOLE)).items():
        phase()
        if phase_of(name) == "backward":
            places.append([parameter.grad.data_ptr() for parameter in step.model.parameters()])
    assert places[0] == places[1] == places[2]
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("forward", ["forward", "forward 2", "forward 3"]),
        ("backward", ["forward", "backward", "forward 2", "backward 2", "forward 3", "backward 3"]),
        ("step", ["forward", "backward", "forward 2", "backward 2", "forward 3", "backward 3", "optimizer"]),
    ],
)
def test_phases_come_once_for_each_micro_batch(mode, names):
    step = assemble(in_parts(3))
    losses = []
    phases = step.phases(mode, *random_batch(WHOLE))
    assert list(phases) == names
    for _ in range(2):
        for phase in phases.values():
            phase()
        losses.append(step.loss.item())
    assert (losses[0] == losses[1]) == (mode != "step"), "a loss is that of one step, not of all"
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_steps_follow_those_of_the_whole_batch():
    whole, parts = assemble(WHOLE), assemble(in_parts(4))
    start = [parameter.detach().clone() for parameter in whole.model.parameters()]
    for seed in range(3):
        batch = random_batch(replace(WHOLE, seed=seed))
        assert torch.allclose(whole(*batch), parts(*batch), rtol=1e-5, atol=0)
    pairs = list(zip(whole.model.parameters(), parts.model.parameters(), strict=True))
    apart = sum((a - b).square().sum() for a, b in pairs).sqrt()
    moved = sum((a - b).square().sum() for a, b in zip(whole.model.parameters(), start, strict=True)).sqrt()
    assert apart < 1e-3 * moved, f"{apart:.2e} apart after moving {moved:.2e}"


def test_a_scaled_loss_adds_up_and_is_skipped_as_one_step():
    step = assemble(in_parts(2, dtype="autocast-fp16"))
    step.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    loss_function, calls = step.loss_function, []

    def second_is_infinite(logits: Tensor, targets: Tensor) -> Tensor:
        calls.append(None)
        return loss_function(logits, targets) * (float("inf") if len(calls) == 2 else 1.0)

    step.loss_function = second_is_infinite
    step(*random_batch(WHOLE))
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), before, strict=True))
    assert step.scaler.get_scale() == 8.0
    step(*random_batch(WHOLE))
    assert not any(torch.equal(a, b) for a, b in zip(step.model.parameters(), before, strict=True))


def test_what_cannot_be_dealt_out_is_refused():
    ids, targets = random_batch(WHOLE)
    with pytest.raises(ValueError, match="11 sequences do not make 4 micro-batches of equally many"):
        assemble(in_parts(4)).phases("step", ids[:11], targets[:11])
    with pytest.raises(ValueError, match="accumulate must be positive, got 0"):
        assemble(replace(WHOLE, accumulate=0))
