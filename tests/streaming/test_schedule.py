"""Schedules of random plans against a model that knows which slot holds what, and the model against broken ones."""

import random
from dataclasses import replace

import pytest

from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.schedule import Kind, Operation, Schedule
from tests.streaming.memory_model import ScheduleError, check, without_wait
from tests.streaming.plans import random_plan


def without(schedule: Schedule, dropped: int) -> Schedule:
    """The schedule without one operation; who waited for it waits for what it waited for."""
    own = schedule.operations[dropped].waits
    kept: list[Operation] = []
    for i, operation in enumerate(schedule.operations):
        if i != dropped:
            waits = {k for j in operation.waits for k in (own if j == dropped else (j,))}
            kept.append(replace(operation, waits=tuple(sorted(j - (j > dropped) for j in waits))))
    return replace(schedule, operations=tuple(kept))


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 150), marks=pytest.mark.slow)])
def test_random_plans(seeds: range) -> None:
    for seed in seeds:
        try:
            check(*random_plan(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def broken(plan: Plan, schedule: Schedule) -> bool:
    try:
        check(plan, schedule)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("seed", range(6))
def test_no_copy_can_be_dropped(seed: int) -> None:
    plan, schedule = random_plan(seed)
    copies = [i for i, operation in enumerate(schedule.operations) if operation.kind in (Kind.FETCH, Kind.EVICT)]
    for i in random.Random(seed).sample(copies, min(12, len(copies))):
        assert broken(plan, without(schedule, i)), schedule.operations[i]


@pytest.mark.parametrize("seed", range(6))
def test_no_wait_can_be_dropped(seed: int) -> None:
    plan, schedule = random_plan(seed)
    waits = [(i, j) for i, operation in enumerate(schedule.operations) for j in operation.waits]
    for i, j in random.Random(seed).sample(waits, min(12, len(waits))):
        assert broken(plan, without_wait(schedule, i, j)), (i, j)


@pytest.mark.parametrize("seed", range(5))
def test_no_kernel_can_be_dropped_or_run_twice(seed: int) -> None:
    plan, schedule = random_plan(seed)
    for i in random.Random(seed).sample(range(len(schedule.operations)), 8):
        assert broken(plan, without(schedule, i))
        twice = (*schedule.operations, replace(schedule.operations[i], waits=(len(schedule.operations) - 1,)))
        if schedule.operations[i].lane == "compute":
            assert broken(plan, replace(schedule, operations=twice))
