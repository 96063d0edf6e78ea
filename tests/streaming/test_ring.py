"""A ring of ranks, each of which streams its own layers: schedules that fit each other, and the bits of one rank."""

import csv
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch

from cs336_systems.config import resolve_size
from cs336_systems.costs.memory import TABLE_SHARE
from cs336_systems.costs.rates import Rates, ours_on
from cs336_systems.costs.streaming import Share, StreamedWork
from cs336_systems.distributed.messages import GroupMessages
from cs336_systems.hardware import GIB, hardware_named
from cs336_systems.streaming.build import build, pairs, ring_times
from cs336_systems.streaming.choose import Caps
from cs336_systems.streaming.lanes import PretendedLink
from cs336_systems.streaming.plan import Keep, Plan
from cs336_systems.streaming.ring import choose_ring
from cs336_systems.streaming.schedule import Kind
from tests.distributed.checks import on_ranks, spawn
from tests.distributed.test_messages import Imagined
from tests.streaming.memory_model import ScheduleError, check, without_wait
from tests.streaming.plans import random_ring, roomy
from tests.streaming.test_choose import MIB, SLOW, SMALL
from tests.streaming.test_run import CONFIG, QK_NORM, TIED, batches, differing, step_of, trained

RATES = Rates.of(hardware_named("h100"))
RESULTS = Path(__file__).parents[2] / "profiles/results"


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


def test_ranks_that_do_one_thing_at_a_time_do_not_wait_in_a_circle():
    """As if each rank's streams were one, and a message needed both ranks at once."""
    for seed in range(60):
        _, schedules = zip(*random_ring(seed, 2 + seed % 3), strict=True)
        together = {member: group for group in pairs(schedules) for member in group}
        heads, lengths = [0] * len(schedules), [len(schedule.operations) for schedule in schedules]
        while heads != lengths:
            at = {(rank, i) for rank, i in enumerate(heads) if i < lengths[rank]}
            able = {member for member in at if at.issuperset(together.get(member, ()))}
            assert able, (seed, heads)
            for rank, _ in able:
                heads[rank] += 1


def test_two_gpus_read_host_memory_as_slowly_as_measured():
    """The plans of the ring of two H200s whose row is committed; without contention they are 11 % too fast."""
    rows = csv.DictReader((RESULTS / "h200/streaming-ring/benchmark_streaming.csv").open())
    ran = {
        row["metric"]: float(row["median"]) for row in rows if row["ranks"] == "2" and row["commit"][:8] == "066fc93b"
    }
    config = replace(resolve_size("llama3-8b"), max_context_length=None).at_context(8192)
    plans = []
    for rank, products, gradients, ring_bytes in ((0, 30, 6, 18_871_851_418), (1, 32, 16, 18_581_363_098)):
        work = StreamedWork(config, 8192, 8192, share=Share(rank, (*(layer % 2 for layer in range(32)), 1)))
        how = {"weights": 16, "gradients": gradients, "ring_bytes": ring_bytes, "table_share": TABLE_SHARE}
        plans.append(Plan(work, 2, 16, "interleaved", Keep(32, products), **how))
    h200 = hardware_named("h200")
    rates = Rates.of(h200, sustained=ours_on(h200, "2026-11-28T18:47"))
    times = ring_times(plans, [build(plan) for plan in plans], rates)
    span = max(each.span for each in times)
    assert span == pytest.approx(ran["step"] / 1e3, rel=0.01)
    for lane, metric, within in (("in", "link_in", 2), ("out", "link_out", 1)):
        assert 100 * mean(each.busy[lane] for each in times) / span == pytest.approx(ran[metric], abs=within)
    idle = 100 - 100 * mean(each.busy["compute"] for each in times) / span
    assert idle == pytest.approx(ran["compute_idle"], abs=1)


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


def check_bits(rank, seeds, configs, n_steps, kind=GroupMessages):
    """A step's losses, gradients and weights, and those of an evaluation, are one rank's."""
    torch.set_num_threads(1)
    messages = kind(rank)
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


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_ring_by_copies_has_the_bits_of_one_rank(n_ranks):
    """On an imagined driver, with messages of many pieces."""
    config = replace(CONFIG, n_layers=5)
    on_ranks(check_bits, n_ranks, [0, 5], [config, config], 2, Imagined)


def test_ten_steps_of_a_ring_are_those_of_one_rank():
    on_ranks(check_bits, 2, [7], [CONFIG], 10)


def interrupted(rank):
    """Rank 1 is killed as it sends for the third time."""
    torch.set_num_threads(1)
    messages = GroupMessages(rank)
    plan, schedule = random_ring(1, 2, CONFIG)[rank.rank]
    step = step_of(plan, schedule, messages=messages)
    send, sent = messages.send, []

    def fail(tensor, peer):
        sent.append(peer)
        if rank.rank == 1 and len(sent) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(tensor, peer)

    messages.send = fail
    try:
        step(*batches(plan, 1)[0])
    except torch.distributed.DistError as error:
        return str(error)


def test_who_waits_for_a_killed_rank_says_so():
    """Before the time-out, which would be said."""
    ended = spawn(interrupted, 2, apart=True)
    assert ended[0].failure is None, ended[0].failure
    said = ended[0].returned
    where = r"(send|receive) chunk \d of round \d at layer \d"
    assert re.match(where + " in vain, as rank 1 has gone or is stuck: .*(by peer|Broken pipe)", said), said
    assert "SIGKILL" in ended[1].failure


@pytest.mark.parametrize("seed", range(3))
def test_no_wait_for_or_of_a_message_can_be_dropped(seed):
    plan, schedule = random_ring(seed, 2)[seed % 2]
    operations, kinds = schedule.operations, (Kind.SEND, Kind.RECEIVE)
    waits = [
        (i, j)
        for i, one in enumerate(operations)
        for j in one.waits
        if one.kind in kinds or operations[j].kind in kinds
    ]
    for i, j in waits[:: max(1, len(waits) // 12)]:
        with pytest.raises(ScheduleError):
            check(plan, without_wait(schedule, i, j))


def ring_of(n_ranks, device=2.5, host=3.0, **options):
    caps = [Caps(int(device * MIB), int(host * MIB), 0, 0)] * n_ranks
    how = {"tokens_per_step": 1536, "chunk": 64, "effort": 500}
    return choose_ring(SMALL, 64, caps, SLOW, **how | options)


def test_a_ring_is_chosen_that_fits_and_is_faster_than_one_rank():
    (one,), two = ring_of(1), ring_of(2)
    assert one.plan.work.share is None
    for choice in two:
        check(choice.plan, choice.schedule)
        assert choice.fits and choice.plan.chunks >= 2
    cuts = {(each.plan.chunks, each.plan.rounds, each.plan.order, each.plan.work.chunk) for each in two}
    assert len(cuts) == 1
    spans = [each.times.span for each in two]
    assert spans[0] == pytest.approx(spans[1], rel=0.05)
    assert one.times.span / max(spans) > 1.5


def test_two_gpus_are_planned_to_be_twice_as_fast_as_one():
    """8B within 24 / 75 GiB each: by layers dealt for the head's time, and by plans made for the ring as a whole."""
    config = replace(resolve_size("llama3-8b"), max_context_length=None).at_context(8192)
    how = {"tokens_per_step": 262_144, "chunks": 2, "effort": 8000}
    h200, caps = Rates.of(hardware_named("h200")), Caps(24 * GIB, 75 * GIB)
    (one,), two = (choose_ring(config, 8192, [caps] * n, h200, **how) for n in (1, 2))
    assert [each.plan.n_layers for each in two] == [17, 15]
    assert {each.plan.lead for each in two} == {1}
    assert all(each.fits for each in two)
    assert one.times.span / max(each.times.span for each in two) > 2
    whole = ring_times([each.plan for each in two], [each.schedule for each in two], h200)
    assert [each.times.span for each in two] == [each.span for each in whole]


@pytest.mark.parametrize(
    ("n_ranks", "options", "said"),
    [
        (7, {}, "6 layers are too few for a ring of 7 ranks"),
        (
            2,
            {"tokens_per_step": 64},
            "no rounds of at least 2 chunks of 64 tokens, as a ring of 2 needs: got 64 tokens",
        ),
        (2, {"chunks": 1}, "as a ring of 2 needs: got"),
        (2, {"device": 0.1}, "on rank . of 2, does not fit .* the device is .* short"),
        (2, {"device": 1, "host": 0.1}, "on rank . of 2, does not fit .* the host is .* short"),
    ],
)
def test_what_no_ring_can_be_is_said(n_ranks, options, said):
    with pytest.raises(ValueError, match=said):
        ring_of(n_ranks, **options)


def test_a_share_has_a_layer_and_restores_no_other_ranks_x():
    with pytest.raises(ValueError, match="3 layers leave rank 1 of a ring without one"):
        Share(0, (0, 2, 0, 2))
    with pytest.raises(
        ValueError, match="a tied embedding is on one rank: the first layer is on 0, the head on another"
    ):
        StreamedWork(TIED, 16, 16, share=Share(0, (0, 1, 0, 1)))
    work = StreamedWork(CONFIG, 16, 16, share=Share.dealt(CONFIG, 0, 2))
    with pytest.raises(ValueError, match="input_every must be at least 1, and 1 where x is not restored, got 2"):
        Plan(work, 2, 1, "sequential", Keep(2, 0), input_every=2)


@pytest.mark.parametrize(("order", "lead"), [("sequential", 1), ("interleaved", 3), ("interleaved", -1)])
def test_forward_leads_by_less_than_a_round_and_in_interleaved_ones_alone(order, lead):
    work = StreamedWork(replace(CONFIG, n_layers=3), 16, 16, share=Share(0, (0, 1, 0, 1)))
    with pytest.raises(ValueError, match=f"forward cannot lead by {lead} layers in {order} rounds"):
        Plan(work, 2, 3, order, Keep(2, 0), lead=lead)
