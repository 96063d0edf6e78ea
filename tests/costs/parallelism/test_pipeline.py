"""Simulated schedules do every operation once, after its inputs, and idle as long as the closed forms say."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from cs336_systems.costs.parallelism.pipeline import Timeline, simulate, timed
from cs336_systems.costs.parallelism.schedules import UNIT, Schedule, make_schedule
from cs336_systems.ranks import SCHEDULES

DURATIONS = [UNIT, {"F": 1.0, "B": 1.25, "W": 0.75}]
SHAPES = [(1, 3), (2, 4), (4, 12)]
IN_HALVES = ("zb-h1", "zbv", "dualpipev")


def run(schedule: str, stages: int, microbatches: int, durations=UNIT, chunks: int = 2) -> Timeline:
    return simulate(schedule, stages, microbatches, chunks=chunks, durations=durations)


every_run = pytest.mark.parametrize("schedule", SCHEDULES)
every_shape = pytest.mark.parametrize(("stages", "microbatches"), SHAPES)


def check(timeline: Timeline) -> None:
    """Every operation once, after its inputs by the arithmetic of parts, and none beside another of its stage."""
    plan, times = timeline.plan, {}
    p, vee = plan.stages, plan.name in ("zbv", "dualpipev")
    for stage, operations in enumerate(timeline.operations):
        done = sorted((part, each.operation.microbatch, each.operation.chunk)
                      for each in operations for part in each.operation.kind)  # fmt: skip
        assert done == sorted(
            (kind, i, c) for kind in "FBW" for i in range(plan.microbatches) for c in range(plan.chunks)
        )
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(operations))
        for each in operations:
            chunk = each.operation.chunk
            part = 2 * p - 1 - stage if vee and chunk else chunk * p + stage
            for kind in each.operation.kind:
                times[kind, each.operation.microbatch, part] = each
    last = p * plan.chunks - 1
    for (kind, i, part), own in times.items():
        needed = {
            "F": [("F", i, part - 1)] if part else [],
            "B": [("F", i, part)] + ([("B", i, part + 1)] if part < last else []),
            "W": [("B", i, part)],
        }[kind]
        for key in needed:
            assert times[key] is own or times[key].end <= own.start + 1e-9, (key, own)


@every_run
@every_shape
@pytest.mark.parametrize("durations", DURATIONS)
def test_every_operation_once_after_its_inputs_and_none_at_the_same_time(schedule, stages, microbatches, durations):
    timeline = run(schedule, stages, microbatches, durations)
    check(timeline)
    kinds = {each.kind for order in timeline.plan.orders for each in order}
    assert kinds == {"F", "BW"} if schedule not in IN_HALVES else "W" in kinds
    assert timeline.busy == pytest.approx([microbatches * sum(durations.values())] * stages)


@every_shape
@pytest.mark.parametrize("durations", DURATIONS)
def test_bubbles_are_those_of_the_closed_forms(stages, microbatches, durations):
    whole, behind = sum(durations.values()), stages - 1
    zero = durations["F"] + durations["B"] - durations["W"]
    for schedule, expected in {"gpipe": behind * whole, "1f1b": behind * whole, "zb-h1": behind * zero}.items():
        timeline = run(schedule, stages, microbatches, durations)
        assert timeline.bubble == pytest.approx(expected)
        assert timeline.bubble_fraction == pytest.approx(expected / (expected + microbatches * whole))
    for chunks in (2, 3, 4):
        if microbatches % stages == 0:
            timeline = run("interleaved", stages, microbatches, durations, chunks)
            assert timeline.bubble == pytest.approx(behind * whole / chunks)


@every_shape
def test_activations_alive(stages, microbatches):
    p, m = stages, microbatches
    assert run("gpipe", p, m).peak_activations == (m,) * p
    assert run("1f1b", p, m).peak_activations == tuple(min(m, p - s) for s in range(p))
    assert run("zb-h1", p, m).peak_activations == (min(m, p),) * p
    assert run("interleaved", p, m).peak_activations == tuple(
        min(m, (2 * (p - s - 1) + (2 - 1) * p + 1) / 2) for s in range(p)
    )
    assert all(alive <= p for alive in run("zbv", p, m).peak_activations)
    assert all(alive <= p + 0.5 for alive in run("dualpipev", p, m).peak_activations)
    for schedule in SCHEDULES:
        timeline = run(schedule, p, m)
        assert all(timeline.activations(stage)[-1][1] == 0 for stage in range(p)), "nothing is alive at the end"


def suited(p: int, m: int) -> list[tuple[str, int]]:
    """(schedule, chunks) that serve p stages and m micro-batches."""
    found = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zbv", 2)]
    found += [("dualpipev", 2)] * (m >= 2 * p)
    return found + [("interleaved", v) for v in (2, 3) if m % p == 0]


def test_random_pipelines_end_whatever_their_delays_within_their_memory():
    """500 of them: parts take any time, which the lists of half of them were not made for, and nobody deadlocks."""
    random = Random(0)
    for _ in range(500):
        p = random.randint(1, 8)
        m = random.randint(1, 20) if random.random() < 0.5 else p * random.randint(1, 4)
        name, chunks = random.choice(suited(p, m))
        durations = [{kind: random.uniform(0.1, 3) for kind in "FBW"} for _ in range(p * chunks)]
        plan = make_schedule(name, p, m, chunks, durations if random.random() < 0.5 else UNIT)
        timeline = timed(plan, durations)
        check(timeline)
        bounds = {"gpipe": m, "zb-h1": p, "zbv": p, "dualpipev": p + 0.5}
        for stage, most in enumerate(timeline.peak_activations):
            behind = p - stage - 1
            own = bounds | {"1f1b": behind + 1, "interleaved": (2 * behind + (chunks - 1) * p + 1) / chunks}
            assert most <= min(m, own[name]), (name, p, m, stage, most)


def ends_with_mailboxes_of(plan: Schedule, capacity: int) -> bool:
    """Whether stages end that do one thing after the other: take what comes before an operation's input, do it, send.

    Nothing is sent while ``capacity`` messages to that stage have not been taken.
    """
    sent, taken = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    places = {
        (source, target): {each.result: i for i, each in enumerate(plan.channel(source, target), start=1)}
        for source in range(plan.stages)
        for target in range(plan.stages)
    }
    todo = []
    for stage, order in enumerate(plan.orders):
        acts: list[tuple[str, tuple[int, int], int]] = []
        last = Counter[tuple[int, int]]()
        for operation in order:
            for source, result in plan.inputs(stage, operation):
                if source != stage:
                    way, number = (source, stage), places[source, stage][result]
                    acts += [("take", way, each) for each in range(last[way] + 1, number + 1)]
                    last[way] = max(last[way], number)
            if (to := plan.receiver(stage, operation)) is not None and to[0] != stage:
                acts.append(("send", (stage, to[0]), 0))
        todo.append(acts[::-1])
    moved = True
    while moved:
        moved = False
        for acts in todo:
            while acts:
                kind, way, number = acts[-1]
                free = sent[way] >= number if kind == "take" else sent[way] - taken[way] < capacity
                if not free:
                    break
                if kind == "take":
                    taken[way] = number
                else:
                    sent[way] += 1
                acts.pop()
                moved = True
    return not any(todo)


def test_stages_that_wait_for_a_place_in_a_mailbox_of_two_messages_end():
    """As on GPUs that would run all streams in order; one message is too few for two schedules.

    Of ZBV, whose lists follow from durations, on two stages alone.
    """
    for p, factor in product(range(2, 9), (1, 2, 3, 8)):
        for name, chunks in suited(p, factor * p):
            if name != "zbv":
                plan = make_schedule(name, p, factor * p, chunks)
                assert ends_with_mailboxes_of(plan, 2) and plan.messages_ahead == 2, (name, p, factor)
    for m, head in product((1, 2, 4, 7, 8, 16, 64), (0.0, 0.1, 0.3, 1.0)):
        durations = [UNIT, UNIT, UNIT, UNIT | {"F": 1 + head}]
        assert ends_with_mailboxes_of(make_schedule("zbv", 2, m, 2, durations), 2), (m, head)
    for name in ("interleaved", "dualpipev"):
        assert not ends_with_mailboxes_of(make_schedule(name, 2, 8, 2), 1)


def test_lists_that_need_room_for_more_than_two_messages_say_how_many():
    found = set()
    for seed in (5, 7, 18, 31):
        random = Random(seed)
        durations = [{kind: random.uniform(0.5, 2) for kind in "FBW"} for _ in range(12)]
        plan = make_schedule("zbv", 6, 18, 2, durations)
        for each in (plan, plan.forwards(18)):
            found.add(room := each.messages_ahead)
            assert ends_with_mailboxes_of(each, room)
            assert room == 2 or not ends_with_mailboxes_of(each, room - 1)
    assert found == {2, 3, 4}


def test_zero_bubble_of_a_v_leaves_little():
    """Idle is what the first micro-batch needs to reach the last stage, and nearly nothing else."""
    for p, m in ((2, 4), (2, 16), (4, 8), (4, 16)):
        v, whole = run("zbv", p, m), run("1f1b", p, m)
        assert v.span == pytest.approx(3 * m + (p - 1) / 2)
        assert max(v.peak_activations) <= max(whole.peak_activations)
    assert run("1f1b", 2, 4).span / run("zbv", 2, 4).span == pytest.approx(1.2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_channels_carry_every_result_once(name):
    plan = make_schedule(name, 3, 6, 2)
    carried = [
        plan.receiver(source, each)
        for source in range(3)
        for target in range(3)
        for each in plan.channel(source, target)
    ]
    remote = [
        (stage, operation.result)
        for stage, order in enumerate(plan.orders)
        for operation in order
        for source, _ in plan.inputs(stage, operation)
        if source != stage
    ]
    assert sorted(carried) == sorted(remote)


def test_a_list_in_the_wrong_order_deadlocks_and_a_dropped_operation_is_missed():
    plan = make_schedule("1f1b", 2, 3)
    first, second = plan.orders
    backward = next(i for i, each in enumerate(first) if each.kind == "BW")
    moved = (first[backward], *first[:backward], *first[backward + 1 :])
    with pytest.raises(RuntimeError, match="1f1b deadlocks"):
        timed(replace(plan, orders=(moved, second)))
    with pytest.raises(RuntimeError, match="1f1b deadlocks"):
        timed(replace(plan, orders=(first[1:], second)))


def test_unequal_parts_take_longer():
    plan, heavy = make_schedule("1f1b", 2, 4), dict.fromkeys("FBW", 2.0)
    assert timed(plan, [UNIT, heavy]).span > timed(plan).span
    assert timed(plan, [UNIT, heavy]).idle_fractions[0] > 0.5 > timed(plan, [UNIT, heavy]).idle_fractions[1]


def test_bad_input():
    for schedule, stages, microbatches, chunks in (
        *(("2f2b", 2, 2, 1), ("1f1b", 0, 2, 1), ("dualpipev", 2, 3, 2)),
        *(("interleaved", 2, 2, 1), ("interleaved", 4, 6, 2)),
    ):
        with pytest.raises(ValueError, match="2f2b|got 0 and 2|got 3|on each stage, got 1|got 6 micro-batches over 4"):
            simulate(schedule, stages, microbatches, chunks=chunks)
    with pytest.raises(ValueError, match="durations must be positive"):
        run("1f1b", 2, 2, UNIT | {"F": 0.0})
    with pytest.raises(ValueError, match="durations of 4 parts are needed, got 2"):
        run("zbv", 2, 2, [UNIT, UNIT])
