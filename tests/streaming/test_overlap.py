"""What a schedule is for: simulated on an H200, kernels seldom wait, and interleaved rounds use the link both ways."""

import pytest

from cs336_systems.config import resolve_size
from cs336_systems.costs.lanes import LaneTimes
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.hardware import hardware_named
from cs336_systems.streaming.build import build, schedule_times
from cs336_systems.streaming.plan import Keep, Order, Plan
from tests.streaming.plans import with_slots

H200 = hardware_named("h200")
WORK = StreamedWork(resolve_size("llama3-8b"), 8192, 8192)
CHUNKS = 3
PAIRS = CHUNKS * WORK.config.n_layers


def times(order: Order) -> tuple[Plan, LaneTimes]:
    """Everything kept; 20 of 32 layers have resident weights."""
    slots = {"weights": 4, "gradients": 2, "input": 9, "attention": 5, "products": 5}
    plan = Plan(WORK, CHUNKS, 6, order, Keep(PAIRS, PAIRS), weights=20)
    plan = with_slots(plan, slots)
    return plan, schedule_times(plan, build(plan), Rates.of(H200))


@pytest.mark.slow
def test_interleaved_rounds_use_both_directions_at_once() -> None:
    (_, apart), (_, together) = times("sequential"), times("interleaved")
    assert together.span < 0.93 * apart.span
    assert min(together.busy["in"], together.busy["out"]) > 0.55 * together.span
    assert together.waited_for["out"] < 0.05 * together.span
