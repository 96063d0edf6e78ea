"""Times of lanes by hand: order, waits, the shared link."""

from dataclasses import replace

import pytest

from cs336_systems.costs.lanes import simulate
from cs336_systems.costs.streaming import Rates

RATES = Rates(1, 1, 1, 1, link_alone=10, link_out_both=5, beside_copies=1, copy_latency_s=0)


def test_a_lane_runs_in_its_order() -> None:
    times = simulate(["compute", "compute", "in"], [2, 3, 40], [(), (), ()], RATES)
    assert (times.starts, times.ends) == ([0, 2, 0], [2, 5, 4])
    assert times.busy == {"in": 4, "compute": 5, "out": 0}
    assert times.span == 5


def test_kernels_wait_for_copies() -> None:
    times = simulate(["in", "compute", "out"], [20, 1, 10], [(), (0,), (1,)], RATES)
    assert times.starts == [0, 2, 3]
    assert times.span == 4
    assert times.waited_for == {"in": 2, "compute": 0, "out": 0}


def test_copies_of_both_ways_share_the_link() -> None:
    """Both at 5 a second until the shorter one ends after 2, then 20 more at 10."""
    times = simulate(["in", "out"], [30, 10], [(), ()], RATES)
    assert times.ends == [4, 2]


def test_copies_to_the_device_may_have_less_of_the_link() -> None:
    """24 at 4 a second beside 15 at 5 until these end after 3, then 12 at 10."""
    rates = replace(RATES, in_beside_out=0.8)
    assert simulate(["in", "out"], [24, 15], [(), ()], rates).ends == pytest.approx([4.2, 3])


def test_kernels_are_slower_beside_copies() -> None:
    slow = Rates(1, 1, 1, 1, link_alone=10, link_out_both=10, beside_copies=0.75, copy_latency_s=0)
    assert simulate(["compute", "in", "out"], [1, 100, 100], [(), (), ()], slow).ends[0] == pytest.approx(2)
    assert simulate(["compute", "in"], [1, 100], [(), ()], slow).ends[0] == pytest.approx(4 / 3)


def test_latency() -> None:
    late = Rates(1, 1, 1, 1, link_alone=10, link_out_both=10, beside_copies=1, copy_latency_s=0.5)
    assert simulate(["in"], [10], [()], late).span == pytest.approx(1.5)


def test_nobody_waits_for_the_future() -> None:
    with pytest.raises(ValueError, match="operation 0 waits for 1"):
        simulate(["in", "out"], [1, 1], [(1,), ()], RATES)
