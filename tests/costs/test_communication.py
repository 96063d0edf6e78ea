"""Ring costs by hand, nccl-tests' factors, and fits that return the link they were made from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.costs.communication import COLLECTIVES, Link, RingCost, busbw, cost, fit

WORLDS = (2, 3, 8)


@pytest.mark.parametrize("n", WORLDS)
def test_factors_are_those_of_nccl_tests_and_without_latency_busbw_is_the_links(n):
    factors = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}
    for collective in COLLECTIVES:
        found = cost(collective, n, 1e6)
        assert found.wire_bytes == pytest.approx(1e6 * factors.get(collective, (n - 1) / n))
        assert found.steps == (n - 1) * (2 if collective == "all_reduce" else 1)
        assert busbw(collective, n, 1e6, Link(0.0, 1 / 450e9).seconds(found)) == pytest.approx(450e9)
        assert cost(collective, 1, 1e9) == RingCost(0, 0.0)


positive = st.floats(1e-3, 1e3)


@given(alpha=positive, beta=positive, n=st.sampled_from(WORLDS), collective=st.sampled_from(COLLECTIVES))
def test_a_fit_returns_the_link_that_made_the_points(alpha, beta, n, collective):
    link = Link(alpha * 1e-6, beta * 1e-11)
    costs = [cost(collective, n, size) for size in (1e6, 1e7, 1e8, 1e9)]
    fitted = fit([(each, link.seconds(each)) for each in costs])
    for each in costs:
        assert fitted.seconds(each) == pytest.approx(link.seconds(each), rel=1e-6)


def test_times_that_fall_with_size_give_no_negative_bandwidth():
    small, large = cost("all_reduce", 2, 1e3), cost("all_reduce", 2, 1e6)
    assert fit([(small, 2e-3), (large, 1e-3)]).beta_s_per_byte == 0
    assert fit([(small, 1e-6), (large, 2.0)]).alpha_s == 0


ONE = cost("all_reduce", 2, 1e6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit([(ONE, 1e-3)]), "got 1"),
        (lambda: fit([(cost("all_reduce", 1, size), 1e-3) for size in (1e6, 1e7)]), "got 0"),
        (lambda: fit([(ONE, 1e-3), (ONE, 2e-3)]), "told apart"),
        (lambda: fit([(ONE, 0.0), (ONE, 2e-3)]), "got 0.0"),
        (lambda: fit([(ONE, float("nan"))]), "got nan"),
        (lambda: cost("reduce", 2, 1), "'reduce'"),
        (lambda: cost("broadcast", 0, 1), "got 0"),
        (lambda: cost("broadcast", 2, -1), "got -1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
