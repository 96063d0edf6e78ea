"""Forward alone, in the slots of a step: losses to the bit, and nothing that the next step would notice."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.blocks import REFERENCE
from cs336_systems.streaming import run
from cs336_systems.streaming.build import build_forward
from cs336_systems.streaming.lanes import PretendedLink
from cs336_systems.streaming.layout import Chunks
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.run import StreamedStep
from cs336_systems.streaming.schedule import Kind, Schedule
from tests.streaming.plans import random_plan
from tests.streaming.test_run import CPU, batches, chunks_of, model_of


def step_of(plan: Plan, schedule: Schedule, seed: int) -> StreamedStep:
    """Of which all memory was NaN at first."""
    how = {"moments": dict(plan.work.moments), "lanes": PretendedLink(seed)}
    step = StreamedStep(plan.work.config, schedule, chunks_of(plan), REFERENCE, CPU, torch.bfloat16, **how)
    for memory in (step.memory.device_slab.memory, step.memory.host_slab.memory):
        memory.fill_(0xFF)
    step.load(model_of(plan.work.config, torch.bfloat16).state_dict())
    return step


@pytest.mark.parametrize("seed", range(60))
def test_it_needs_no_memory_but_the_steps(seed):
    plan, schedule = random_plan(seed)
    forward = build_forward(plan)
    assert forward.slots == schedule.slots
    assert forward.places == schedule.places
    for held in (held for operation in forward.operations for held in (*operation.reads, *operation.writes)):
        assert held.slot.index < schedule.rings[held.slot.ring].slots
    kinds = [operation.kind for operation in forward.operations]
    assert set(kinds) <= {Kind.FETCH, Kind.EMBED, Kind.FORWARD, Kind.LOSS}
    assert kinds.count(Kind.LOSS) == plan.chunks


@pytest.mark.parametrize("seed", range(10))
def test_losses_are_those_of_a_step_and_the_next_step_is_as_without(seed):
    plan, schedule = random_plan(seed)
    forward, steps = build_forward(plan), [step_of(plan, schedule, seed + i) for i in range(2)]
    evaluated, plain = steps
    round_ = replace(chunks_of(plan), rounds=1)
    for i, (batch, (ids, targets)) in enumerate(
        zip(batches(evaluated.chunks, 2, plan.work.config), batches(round_, 2, plan.work.config), strict=True)
    ):
        loss = evaluated.evaluate(forward, ids, targets)
        assert torch.equal(loss, evaluated.evaluate(forward, ids, targets))
        if plan.rounds == 1:
            assert torch.equal(loss, plain(ids, targets)) and torch.equal(loss, evaluated(ids, targets))
        elif i == 0:
            model = model_of(plan.work.config, torch.bfloat16)
            torch.testing.assert_close(loss, model(ids, targets).detach(), rtol=2**-6, atol=0, check_dtype=False)
        assert torch.equal(evaluated(*batch), plain(*batch))
    got, expected = evaluated.state_dict(), plain.state_dict()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def test_fewer_sequences_than_a_round_has():
    plan, schedule = next(one for one in map(random_plan, range(100)) if chunks_of(one[0]).n_sequences >= 4)
    step, forward = step_of(plan, schedule, 0), build_forward(plan)
    most = Chunks(plan.work.chunk, plan.work.context_length, plan.chunks, 1).n_sequences
    ids, targets = torch.randint(plan.work.config.vocab_size, (2, most, plan.work.context_length))
    losses = torch.stack([step.evaluate(forward, *pair) for pair in zip(ids.split(1), targets.split(1), strict=True)])
    torch.testing.assert_close(step.evaluate(forward, ids, targets), losses.mean(), rtol=1e-6, atol=0)
    length = plan.work.context_length
    for shape in ((0, length), (most + 1, length), (1, 3)):
        wrong = torch.zeros(shape, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"an evaluation takes 1 to {most} sequences of {length} token ids"):
            step.evaluate(forward, wrong, wrong)


@pytest.mark.parametrize("seed", [102, 180])  # in which x is restored in slots that nothing else has written
def test_what_nobody_writes_is_not_looked_at(seed):
    plan, schedule = random_plan(seed)
    assert plan.input_every > 1
    step = step_of(plan, schedule, 0)
    (batch,) = batches(step.chunks, 1, plan.work.config)
    assert step.find_nonfinite(*batch) is None


def test_a_tensor_that_is_not_finite_is_named(monkeypatch):
    plans = map(random_plan, range(100))
    plan, schedule = next(one for one in plans if one[0].work.config.n_layers > 1 and one[0].clipping)
    step = step_of(plan, schedule, 0)
    (batch,) = batches(step.chunks, 1, plan.work.config)
    assert step.find_nonfinite(*batch) is None
    weights = dict(step.model().named_parameters())
    with torch.no_grad():
        weights["layers.1.ffn.w1.weight"].fill_(3e38)
    assert "by forward" in step.find_nonfinite(*batch)
    monkeypatch.setattr(run, "PIECE", 5)  # elements that are looked at together
    with torch.no_grad():
        weights["layers.0.attn.q_proj.weight"][-1, -1] = float("nan")
    assert step.find_nonfinite(*batch) == "parameter layers.0.attn.q_proj.weight"
