"""Knees and crossings of curves that are known."""

import random

import pytest

from cs336_systems.experiments.leaks.knees import crossing, fit_knee

XS = [1.0, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("knee", [5.0, 10.0, 20.0, 40.0])
def test_the_knee_of_a_clean_roofline_is_found(knee):
    found = fit_knee(XS, [max(3.0, 3.0 * x / knee) for x in XS])
    assert found.position == pytest.approx(knee)
    assert (found.flat, found.slope) == pytest.approx((3.0, 3.0 / knee))
    assert found.at(1) == pytest.approx(3.0)
    assert found.at(2 * knee) == pytest.approx(6.0)


def test_a_fixed_cost_is_in_neither_rate():
    found = fit_knee(XS, [0.5 + max(3.0, 3.0 * x / 20) for x in XS], fixed=0.5)
    assert (found.flat, found.slope, found.position) == pytest.approx((3.0, 3.0 / 20, 20))
    assert found.at(1) == pytest.approx(3.5)


def test_what_the_corner_adds_is_in_no_rate():
    """Both resources at once take longer than either; an intercept would make a rate above the true one of it."""
    corner = {16.0: 0.1, 32.0: 0.25}
    found = fit_knee(XS, [max(3.0, 3.0 * x / 20) * (1 + corner.get(x, 0.0)) for x in XS])
    assert (found.flat, found.slope, found.position) == pytest.approx((3.0, 3.0 / 20, 20))


def test_a_cost_that_no_row_holds_makes_rates_smaller_but_never_larger():
    found = fit_knee(XS, [0.5 + max(3.0, 3.0 * x / 20) for x in XS])
    assert found.flat == pytest.approx(3.5) and 3.0 / 20 < found.slope < 1.1 * 3.0 / 20


def test_noise_of_five_percent_moves_the_knee_little():
    draw = random.Random(0)
    ys = [max(3.0, 3.0 * x / 20) * draw.uniform(0.95, 1.05) for x in XS]
    assert fit_knee(XS, ys).position == pytest.approx(20, rel=0.2)


def test_order_of_the_points_and_unit_of_y_do_not_matter():
    ys = [max(3.0, 3.0 * x / 20) for x in XS]
    backwards = fit_knee(XS[::-1], [1e-6 * y for y in ys[::-1]])
    assert backwards.position == pytest.approx(fit_knee(XS, ys).position)


@pytest.mark.parametrize(
    ("xs", "ys", "message"),
    [
        ([1, 2, 3], [1, 1, 2], "at least four points, got 3"),
        ([1, 2, 3, 4], [1, 1, 1, 1], "do not rise"),
        ([1, 2, 3, 4], [4, 3, 2, 1], "do not rise"),
        ([1, 2, 2, 4], [1, 1, 2, 4], "repeats"),
        ([1, 2, 3, 4], [1, 0, 2, 4], "positive times, got 0"),
        ([1, 2, 3, 4], [1, float("nan"), 2, 4], "positive times"),
        ([0, 2, 3, 4], [1, 1, 2, 4], "not positive"),
        ([1, 2, 3, 4], [1, 1, 2, 2.9], "do not rise to 3 times the first"),
    ],
)
def test_what_has_no_knee_is_refused(xs, ys, message):
    with pytest.raises(ValueError, match=message):
        fit_knee(xs, ys)


def test_times_below_the_fixed_cost_are_refused():
    with pytest.raises(ValueError, match="above the fixed 1, got 1"):
        fit_knee([1, 2, 3, 4], [1, 2, 3, 4], fixed=1.0)


def test_a_crossing_lies_between_its_points_on_logarithmic_axes():
    assert crossing([1, 10, 100], [1, 1, 100], 10) == pytest.approx(10**1.5)
    assert crossing([1, 4, 16], [1, 4, 16], [8, 8, 8]) == pytest.approx(8)
    assert crossing([1, 4, 16], [1, 2, 4], [4, 2, 1]) == pytest.approx(4)


def test_crossings_at_the_ends():
    assert crossing([1, 2, 4], [1, 2, 3], 5) is None
    assert crossing([1, 2, 4], [6, 7, 8], 5) == 1
    assert crossing([1, 2, 4, 8], [6, 1, 1, 10], 5) > 4  # an early outlier is no crossing
    for xs, ys in (([], []), ([1, 2], [0, 1])):
        with pytest.raises(ValueError, match="positive values"):
            crossing(xs, ys, 1)
