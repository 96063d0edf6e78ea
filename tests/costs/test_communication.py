"""Ring costs against counted messages, nccl-tests' factors, and fits that return the link they were made from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.costs.communication import COLLECTIVES, LINKS, Link, RingCost, busbw, busbw_factor, cost, fit

WORLDS = (2, 3, 4, 6, 8)


def ring_all_reduce_bytes(n_ranks, total_bytes):
    """What each rank sends, counted message by message: a reduce-scatter, then an all-gather."""
    chunk = total_bytes / n_ranks
    sent = [0.0] * n_ranks
    for _ in range(2):
        for _ in range(n_ranks - 1):
            for rank in range(n_ranks):
                sent[rank] += chunk
    assert len(set(sent)) == 1
    return sent[0]


@pytest.mark.parametrize("n", WORLDS)
def test_factors_are_those_of_nccl_tests(n):
    assert busbw_factor("all_reduce", n) == pytest.approx(2 * (n - 1) / n)
    for collective in ("all_gather", "reduce_scatter", "all_to_all"):
        assert busbw_factor(collective, n) == pytest.approx((n - 1) / n)
    assert busbw_factor("broadcast", n) == 1


@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_sends_what_the_ring_sends_and_is_its_two_halves(n):
    whole = cost("all_reduce", n, 1e6)
    assert whole.wire_bytes == pytest.approx(ring_all_reduce_bytes(n, 1e6))
    halves = cost("reduce_scatter", n, 1e6), cost("all_gather", n, 1e6)
    assert whole.steps == sum(half.steps for half in halves) == 2 * (n - 1)
    assert whole.wire_bytes == pytest.approx(sum(half.wire_bytes for half in halves))


def test_a_world_of_one_costs_nothing():
    for collective in COLLECTIVES:
        assert cost(collective, 1, 1e9) == RingCost(0, 0.0)
        assert Link(1.0, 1.0).seconds(cost(collective, 1, 1e9)) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_without_latency_busbw_is_the_links_bandwidth(collective):
    link = LINKS["nvlink4"]
    for n in WORLDS:
        seconds = link.seconds(cost(collective, n, 1e9))
        assert busbw(collective, n, 1e9, seconds) == pytest.approx(450e9)


def test_figures_by_hand():
    link = Link(10e-6, 1 / 100e9)
    assert link.seconds(cost("all_reduce", 4, 1e9)) == pytest.approx(6 * 10e-6 + 1.5e9 / 100e9)
    assert link.seconds(cost("broadcast", 4, 1e9)) == pytest.approx(3 * 10e-6 + 1e9 / 100e9)
    assert link.bytes_per_s == 100e9
    assert Link(1.0, 0.0).bytes_per_s == float("inf")


positive = st.floats(1e-3, 1e3)


@given(alpha=positive, beta=positive, n=st.sampled_from(WORLDS), collective=st.sampled_from(COLLECTIVES))
def test_a_fit_returns_the_link_that_made_the_points(alpha, beta, n, collective):
    link = Link(alpha * 1e-6, beta * 1e-11)
    costs = [cost(collective, n, size) for size in (1e6, 1e7, 1e8, 1e9)]
    fitted = fit([(each, link.seconds(each)) for each in costs])
    for each in costs:
        assert fitted.seconds(each) == pytest.approx(link.seconds(each), rel=1e-6)


@given(st.lists(st.floats(0.2, 5), min_size=6, max_size=6), st.sampled_from(WORLDS))
def test_a_fit_to_noise_is_no_worse_than_any_neighbour_and_never_negative(noise, n):
    costs = [cost(name, n, size) for name in ("all_reduce", "broadcast") for size in (1e5, 1e7, 1e9)]
    points = [(each, Link(2e-5, 1e-11).seconds(each) * factor) for each, factor in zip(costs, noise, strict=True)]

    def squares(link):
        return sum((link.seconds(each) / seconds - 1) ** 2 for each, seconds in points)

    fitted = fit(points)
    assert fitted.alpha_s >= 0
    assert fitted.beta_s_per_byte >= 0
    for a in (0.99, 1.0, 1.01):
        for b in (0.99, 1.0, 1.01):
            other = Link(fitted.alpha_s * a + 1e-9 * (a > 1), fitted.beta_s_per_byte * b + 1e-15 * (b > 1))
            assert squares(fitted) <= squares(other) * (1 + 1e-9) + 1e-12


def test_times_that_fall_with_size_give_no_negative_bandwidth():
    small, large = cost("all_reduce", 2, 1e3), cost("all_reduce", 2, 1e6)
    assert fit([(small, 2e-3), (large, 1e-3)]).beta_s_per_byte == 0
    assert fit([(small, 1e-6), (large, 2.0)]).alpha_s == 0


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(cost("all_reduce", 2, 1e6), 1e-3)], "at least two measured points between ranks, got 1"),
        ([(cost("all_reduce", 1, size), 1e-3) for size in (1e6, 1e7)], "between ranks, got 0"),
        ([(cost("all_reduce", 2, 1e6), 1e-3), (cost("all_reduce", 2, 1e6), 2e-3)], "cannot be told apart"),
        ([(cost("all_reduce", 2, 1e6), 0.0), (cost("all_reduce", 2, 1e6), 2e-3)], "must be positive, got 0.0"),
        ([(cost("all_reduce", 2, 1e6), float("nan"))], "must be positive, got nan"),
    ],
)
def test_points_that_fit_nothing_are_an_error(points, message):
    with pytest.raises(ValueError, match=message):
        fit(points)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="unknown collective 'reduce': known are all_reduce"):
        cost("reduce", 2, 1)
    with pytest.raises(ValueError, match="world size must be positive, got 0"):
        busbw_factor("broadcast", 0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        cost("broadcast", 2, -1)
