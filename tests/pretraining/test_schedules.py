"""Learning rates against their closed forms, their ends, and what holds for any schedule."""

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.pretraining.schedules import Schedule, ScheduleKind

PEAK = 3e-4
KINDS = get_args(ScheduleKind)


@st.composite
def schedules(draw):
    n_steps = draw(st.integers(1, 300))
    warmup_steps = draw(st.integers(0, n_steps))
    kind = draw(st.sampled_from(KINDS))
    cooldown = draw(st.none() | st.integers(0, n_steps - warmup_steps)) if kind == "wsd" else None
    return Schedule(PEAK, n_steps, kind, warmup_steps, draw(st.floats(0, 1)), cooldown)


@pytest.mark.parametrize(
    ("kind", "closed_form"),
    [
        ("constant", lambda t: 1.0),
        ("linear", lambda t: 0.1 + 0.9 * (1 - t)),
        ("cosine", lambda t: 0.1 + 0.9 * math.cos(math.pi * t / 2) ** 2),
        ("wsd", lambda t: 1.0 if t <= 0.75 else 0.1 + 0.9 * (1 - math.sqrt((t - 0.75) / 0.25))),
    ],
)
def test_after_the_warmup_the_rate_follows_its_closed_form(kind, closed_form):
    schedule = Schedule(PEAK, 100, kind, warmup_steps=20, final_fraction=0.1)  # wsd cools down for 20 of the other 80
    assert [schedule(step) for step in range(20)] == pytest.approx([PEAK * (step + 1) / 20 for step in range(20)])
    expected = [PEAK * closed_form((step - 20) / 80) for step in range(20, 101)]
    assert [schedule(step) for step in range(20, 101)] == pytest.approx(expected, rel=1e-12)


@given(schedules())
def test_any_schedule_rises_through_its_warmup_and_never_again(schedule):
    rates = [schedule(step) for step in range(schedule.n_steps + 3)]
    warm, after = rates[: schedule.warmup_steps], rates[schedule.warmup_steps :]
    assert warm == sorted(set(warm))
    assert after == sorted(after, reverse=True)
    assert max(rates) <= PEAK * (1 + 1e-15)
    if schedule.warmup_steps:
        assert warm[0] > 0
        assert warm[-1] == PEAK
    assert min(after) >= PEAK * schedule.final_fraction * (1 - 1e-15)
    assert len(set(rates[schedule.n_steps :])) == 1


@given(schedules())
def test_the_end_is_the_final_fraction(schedule):
    never_decays = schedule.kind == "constant" or schedule._decaying_steps == 0
    end = PEAK if never_decays else PEAK * schedule.final_fraction
    assert schedule(schedule.n_steps) == schedule(10 * schedule.n_steps) == pytest.approx(end, abs=1e-19)


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_a_jump(kind):
    """A step of a million changes the rate by the steepest slope at most: the square root's at its start."""
    n_steps = 10_000
    schedule = Schedule(PEAK, n_steps, kind, warmup_steps=1000)
    rates = [schedule(step) for step in range(n_steps + 1)]
    largest = max(abs(b - a) for a, b in itertools.pairwise(rates)) / PEAK
    assert largest <= {"wsd": math.sqrt(1 / 2000)}.get(kind, 1 / 1000) * (1 + 1e-9)


def test_a_run_of_one_step_and_a_run_that_is_all_warmup():
    assert [Schedule(PEAK, 1, kind)(0) for kind in KINDS] == [PEAK] * 4
    assert Schedule(PEAK, 4, "linear", warmup_steps=4)(3) == PEAK
    assert Schedule(PEAK, 4, "wsd", cooldown_steps=0)(4) == PEAK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "cosin"}, "unknown schedule 'cosin': known are cosine, linear, wsd, constant"),
        ({"peak": -1.0}, "a learning rate must be finite and not negative, got -1.0"),
        ({"peak": math.nan}, "a learning rate must be finite and not negative, got nan"),
        ({"n_steps": 0}, "a schedule has at least one step, got 0"),
        ({"final_fraction": 1.5}, "the final fraction of the learning rate must lie in 0..1, got 1.5"),
        ({"warmup_steps": 101}, "warm-up must take 0 to 100 steps, all there are; got 101"),
        ({"warmup_steps": -1}, "warm-up must take 0 to 100 steps"),
        ({"cooldown_steps": 5}, "only the schedule wsd has cool-down steps, got 5 with cosine"),
        ({"kind": "wsd", "warmup_steps": 60, "cooldown_steps": 41}, "cool-down must take 0 to 40 steps"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**({"peak": PEAK, "n_steps": 100} | arguments))


def test_steps_are_counted_from_zero():
    with pytest.raises(ValueError, match="steps are counted from 0, got -1"):
        Schedule(PEAK, 10)(-1)
