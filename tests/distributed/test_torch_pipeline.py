"""Torch's pipelines train what one process trains, so that they are a fair peer."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.costs.parallelism.schedules import make_schedule
from cs336_systems.distributed.process_group import Rank
from cs336_systems.ranks import SCHEDULES, Parallel
from cs336_systems.training import assemble, random_batch
from tests.training.shared import Shared

from .checks import on_ranks
from .test_pipeline import LLAMA

BIASED = replace(LLAMA, name="tiny-biased", n_layers=6, qkv_bias=True, qk_norm=True, head_dim=8)


def run_of(schedule, config=BIASED, **others):
    how = Parallel(pipeline=2, pipeline_schedule=schedule, pipeline_by="torch")
    return Shared.of(config, how=how, batch_size=2, accumulate=4, optimizer="torch-fused", seed=3, **others)


def train(case, rank=None):
    """Losses of three steps, and the gradients of the first."""
    step, batch = assemble(case, rank), random_batch(replace(case, how=Parallel()))
    phases = step.phases("step", *batch)
    phases["passes" if rank else "forward"]()
    if not rank:
        for name, phase in phases.items():
            if name not in ("forward", "optimizer"):
                phase()
    gradients = {name: p.grad.clone() for name, p in step.model.named_parameters()}
    losses = [step.loss.item()]
    phases["optimizer"]()
    return losses + [step(*batch).item() for _ in range(2)], gradients


def train_each(rank: Rank, cases):
    return [train(case, rank) for case in cases]


def orders(rank: Rank):
    """By schedule, the operations of this stage in torch's order and in ours."""
    found = {}
    for name in ("interleaved", "zb-h1", "dualpipev"):
        runner = assemble(run_of(name), rank).pipeline.schedule
        plan = make_schedule(name, 2, 4, 2)
        actions = [each for each in runner.pipeline_order[rank.rank] if each is not None]
        actions = [each for action in actions for each in action.sub_actions or (action,)]
        theirs = [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in actions]
        kinds = {"F": "F", "B": "I", "W": "W", "BW": "B"}
        ours = [(kinds[op.kind], plan.part(rank.rank, op.chunk), op.microbatch) for op in plan.orders[rank.rank]]
        found[name] = theirs, ours
    return found


def test_stages_do_the_same_operations_in_the_same_order():
    for of_rank in on_ranks(orders, 2):
        for name, (theirs, ours) in of_rank.items():
            assert theirs == ours, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_train_what_one_process_trains(schedule):
    case = run_of(schedule)
    losses, gradients = train(replace(case, how=Parallel()))
    seen = set()
    for ((own_losses, own_gradients),) in on_ranks(train_each, 2, [case]):
        torch.testing.assert_close(own_losses, losses, rtol=2e-6, atol=0)
        for name, own in own_gradients.items():
            torch.testing.assert_close(own, gradients[name], rtol=1e-4, atol=1e-6)
        seen |= own_gradients.keys()
    assert seen == gradients.keys()
