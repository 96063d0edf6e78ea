"""What is flagged, against the definition of a z-score written out."""

import math
import random
import statistics

import pytest

from cs336_systems.pretraining.outliers import WINDOW, OutlierWatch
from cs336_systems.pretraining.run_records import Step


def step(number, loss=2.0, norm=1.0):
    return Step(number, 0.1, 10, loss, norm, 1e-3)


def see(losses):
    """What is flagged of each step."""
    watch = OutlierWatch()
    return [watch.see(step(number, loss)) for number, loss in enumerate(losses)]


def noise(n, seed=0):
    source = random.Random(seed)
    return [3 + source.gauss(0, 0.1) for _ in range(n)]


@pytest.mark.parametrize("value", [3.9, 2.1])
def test_z_is_the_distance_from_the_last_hundred_in_their_deviations(value):
    losses = [50.0, *noise(WINDOW)]
    *calm, flagged = see([*losses, value])
    assert not any(calm)
    z = (value - statistics.fmean(losses[1:])) / statistics.pstdev(losses[1:])
    assert (flagged[0].quantity, flagged[0].value, len(flagged)) == ("loss", value, 1)
    assert flagged[0].z == pytest.approx(z)
    assert flagged[0].step == WINDOW + 1


def test_nothing_is_flagged_before_there_are_a_hundred_steps_nor_a_loss_that_falls():
    assert not any(see([*noise(WINDOW - 1), 50.0]))
    assert not any(see([10 - 0.01 * number for number in range(500)]))


def test_noise_is_not_flagged():
    assert not any(see(noise(20_000)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_flagged_at_once_and_compared_with_nothing(value):
    *before, flagged, after = see([*noise(3), value, 3.0])
    assert not any(before) and not after
    assert repr(flagged[0].value) == repr(flagged[0].z) == repr(value)
    *_, later = see([*noise(WINDOW), value, 9.0])
    assert later[0].value == 9.0


def test_both_quantities_are_watched_and_a_constant_one_may_not_change():
    watch = OutlierWatch()
    for number in range(WINDOW):
        assert watch.see(step(number)) == []
    assert watch.see(step(WINDOW)) == []
    flagged = watch.see(step(WINDOW + 1, loss=1.0, norm=2.0))
    assert [(outlier.quantity, outlier.z) for outlier in flagged] == [("loss", -math.inf), ("norm", math.inf)]
