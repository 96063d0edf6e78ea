"""A ring of ranks, each of which streams its own layers: schedules that fit each other, and the bits of one rank."""

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.config import resolve_size
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import Share, StreamedWork
from cs336_systems.hardware import GIB, hardware_named
from cs336_systems.streaming.build import build, pairs, ring_times
from cs336_systems.streaming.choose import Caps, CapsTooSmallError, choose_ring
from cs336_systems.streaming.lanes import PretendedLink
from cs336_systems.streaming.messages import RingMessages
from cs336_systems.streaming.schedule import Kind
from tests.distributed.checks import on_ranks, spawn
from tests.streaming.memory_model import check
from tests.streaming.plans import random_plan, random_ring, roomy
from tests.streaming.test_run import CONFIG, QK_NORM, TIED, batches, differing, model_of, step_of, trained, weights_of

RATES = Rates.of(hardware_named("h100"))


def test_schedules_of_all_ranks_are_sound_and_fit_each_other():
    """Every rank's own is checked by the model of its memory; none waits for another in a circle."""
    for seed in range(30):
        ranks = random_ring(seed, 2 + seed % 3)
        try:
            for each in ranks:
                check(*each)
            plans, schedules = zip(*ranks, strict=True)
            times = ring_times(plans, schedules, RATES)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        reductions, *messages = pairs(schedules)
        assert len({times[rank].starts[i] for rank, i in reductions}) == 1
        for (source, i), (target, j) in messages:
            assert times[source].starts[i] == times[target].starts[j]


def test_a_message_too_few_is_found():
    plans, schedules = zip(*random_ring(1, 2), strict=True)
    dropped = next(i for i, o in enumerate(schedules[1].operations) if o.kind is Kind.SEND)
    operations = [
        replace(o, waits=tuple(j - (j > dropped) for j in o.waits if j != dropped))
        for i, o in enumerate(schedules[1].operations)
        if i != dropped
    ]
    with pytest.raises(ValueError, match="rank 1 sends .* rank 0 does not expect"):
        ring_times(plans, [schedules[0], replace(schedules[1], operations=tuple(operations))], RATES)


def check_bits(rank, seeds, configs, n_steps):
    """A step's losses, gradients and weights, and those of an evaluation, are one rank's."""
    torch.set_num_threads(1)
    messages = RingMessages(rank)
    for seed, config in zip(seeds, configs, strict=True):
        plan, schedule = random_ring(seed, rank.world_size, config)[rank.rank]
        whole = step_of(roomy(plan), build(roomy(plan)))
        expected = trained(whole, n_steps)
        step = step_of(plan, schedule, PretendedLink(seed), messages=messages)
        step.rehearse(*batches(plan, 1)[0])
        got = trained(step, n_steps)
        assert got and not differing(got, {name: expected[name] for name in got}), (seed, config.name)
        if plan.clipping:
            assert torch.equal(step.guard.norm, whole.guard.norm)
        ids, targets = batches(replace(plan, rounds=1), 1)[0]
        assert torch.equal(step.evaluate(ids, targets), whole.evaluate(ids, targets))
        own = set(got)
    return own


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_ring_has_the_bits_of_one_rank(n_ranks):
    """Three layers on two ranks, five on three: shares differ. Rounds, clipping and long sequences are the seeds'."""
    five = replace(CONFIG, n_layers=5)
    configs = [replace(each, n_layers=five.n_layers if n_ranks == 3 else 3) for each in (CONFIG, TIED, QK_NORM, CONFIG)]
    names = on_ranks(check_bits, n_ranks, [0, 3, 5, 8], configs, 3)
    everything = set(trained(step_of(roomy(random_ring(8, n_ranks, configs[-1])[0][0])), 1))
    assert set.union(*names) == everything


def test_ten_steps_of_a_ring_are_those_of_one_rank():
    on_ranks(check_bits, 2, [7], [CONFIG], 10)
