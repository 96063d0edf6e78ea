"""The holdings of stages by their lists, counted by hand and by simulation."""

from itertools import product

import pytest

from cs336_systems.costs.parallelism import pipeline
from cs336_systems.costs.parallelism.bubbles import simulates
from cs336_systems.costs.parallelism.held import Held, Task, fullest, holdings, shown
from cs336_systems.costs.parallelism.schedules import make_schedule
from cs336_systems.ranks import SCHEDULES


def test_one_stage_of_two_micro_batches_by_hand():
    """ZB-H1 on the last of two stages: F0 B0 F1 B1 W0 W1 of three blocks, so that W0 waits for a micro-batch more."""
    plan = make_schedule("zb-h1", 2, 2)
    assert [(each.kind, each.microbatch) for each in plan.orders[1]] == [
        *zip("FBFBWW", (0, 0, 1, 1, 0, 1), strict=True)
    ]
    blocks, cases = holdings(plan, [2, 3])[1]
    assert blocks == (3,)
    new, there = (dict.fromkeys(("first", "last"), True) | {"n_blocks": 3, "new": new} for new in (True, False))
    assert cases == {
        Task("F", **new): {Held(0, 0, 0, 0, False, False), Held(0, 3, 0, 0, True, True)},
        Task("B", **new): {Held(3, 0, 1, 0, False, False), Held(3, 3, 1, 0, True, True)},
        Task("W", **new): {Held(0, 6, 0, 0, True, True)},
        Task("W", **there): {Held(0, 3, 0, 3, True, True)},
    }
    assert fullest(cases["F", True, True, 3, True]) == [Held(0, 3, 0, 0, True, True)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_short_lists_show_what_stages_hold_of_many_micro_batches(schedule):
    """As many as the simulation of all has alive, while the last operation of the fullest case runs, too."""
    n_compared = 0
    for n_stages, chunks, m in product((2, 3, 8), (2, 3), (2, 7, 24, 40, 64)):
        if not simulates(schedule, n_stages, m, chunks):
            continue
        whole = pipeline.simulate(schedule, n_stages, m, chunks=chunks)
        plan = make_schedule(schedule, n_stages, shown(schedule, n_stages, m), chunks)
        counts = [1] * len(plan.places)
        found = holdings(plan, counts)
        every = holdings(whole.plan, counts)
        for (blocks, cases), (_, of_all), most in zip(found, every, whole.peak_activations, strict=True):
            alive = max(held.whole + held.late + (task.kind == "F") for task, own in cases.items() for held in own)
            assert alive == pytest.approx(most * len(blocks))
            assert {task: fullest(own) for task, own in cases.items()} == {t: fullest(own) for t, own in of_all.items()}
        n_compared += 1
    assert n_compared >= 5
