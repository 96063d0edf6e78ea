"""Learning rates against their closed forms, their ends, and properties of any of them."""

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.pretraining.schedules import LearningRate, ScheduleKind

PEAK = 3e-4
KINDS = get_args(ScheduleKind)


@st.composite
def learning_rates(draw):
    n_steps = draw(st.integers(1, 300))
    warmup_steps = draw(st.integers(0, n_steps))
    kind = draw(st.sampled_from(KINDS))
    cooldown = draw(st.none() | st.integers(0, n_steps - warmup_steps)) if kind == "wsd" else None
    return LearningRate(PEAK, n_steps, kind, warmup_steps, draw(st.floats(0, 1)), cooldown)


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
    rate = LearningRate(PEAK, 100, kind, warmup_steps=20, final_fraction=0.1)  # wsd cools down for 20 of the other 80
    assert [rate(step) for step in range(20)] == pytest.approx([PEAK * (step + 1) / 20 for step in range(20)])
    expected = [PEAK * closed_form((step - 20) / 80) for step in range(20, 101)]
    assert [rate(step) for step in range(20, 101)] == pytest.approx(expected, rel=1e-12)


@given(learning_rates())
@settings(max_examples=60)
def test_any_rate_rises_through_its_warmup_and_falls_to_its_end_without_a_jump(rate):
    rates = [rate(step) for step in range(rate.n_steps + 3)]
    warm, after = rates[: rate.warmup_steps], rates[rate.warmup_steps :]
    assert warm == sorted(set(warm)) and after == sorted(after, reverse=True)
    assert max(rates) <= PEAK * (1 + 1e-15)
    assert not warm or (warm[0] > 0 and warm[-1] == PEAK)
    assert len(set(rates[rate.n_steps :])) == 1
    decays = rate.kind != "constant" and rate.warmup_steps < rate.n_steps and rate.cooldown_steps != 0
    if decays and (rate.kind != "wsd" or rate.cooldown_steps or round(0.2 * rate.n_steps)):
        assert rates[-1] == pytest.approx(PEAK * rate.final_fraction, abs=1e-19)
    else:
        assert rates[-1] == PEAK


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"final_fraction": 1.5}, "1.5"),
        ({"warmup_steps": 101}, "0 to 100 .* 101"),
        ({"warmup_steps": -1}, "0 to 100 .* -1"),
        ({"cooldown_steps": 5}, "5 with cosine"),
        ({"kind": "wsd", "warmup_steps": 60, "cooldown_steps": 41}, "0 to 40 .* 41"),
        ({"kind": "wsd", "cooldown_steps": -1}, "0 to 100 .* -1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, value):
    with pytest.raises(ValueError, match=value):
        LearningRate(**({"peak": PEAK, "n_steps": 100} | arguments))
