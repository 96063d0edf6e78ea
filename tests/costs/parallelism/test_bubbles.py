"""Spans of few micro-batches against simulations of all."""

from itertools import product
from types import SimpleNamespace

import pytest

from cs336_systems.costs.parallelism import bubbles, pipeline
from cs336_systems.costs.parallelism.bubbles import least_bubble, simulates, span_seconds
from cs336_systems.ranks import SCHEDULES

DURATIONS = {"F": 2.0, "B": 2.7, "W": 1.5}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_micro_batches_tell_the_span_of_many(schedule):
    n_compared = 0
    for n_stages, chunks, m in product((2, 3, 8), (1, 2, 3), (1, 2, 7, 8, 9, 24, 40, 64)):
        if simulates(schedule, n_stages, m, chunks):
            whole = pipeline.simulate(schedule, n_stages, m, chunks=chunks, durations=DURATIONS)
            assert span_seconds(schedule, n_stages, m, chunks, DURATIONS) == pytest.approx(whole.span)
            assert least_bubble(schedule, n_stages, chunks, DURATIONS) <= whole.bubble + 1e-9
            n_compared += 1
    assert n_compared >= 8


def test_a_rhythm_that_begins_late_is_waited_for(monkeypatch):
    """A schedule that runs eight micro-batches or more, whose span grows by a step of its own up to the twentieth."""

    def late(schedule, n_stages, m, *, chunks, durations=None):
        if m < 8:
            raise ValueError(f"needs 8 microbatches, got {m}")
        return SimpleNamespace(span=float(10 * m + min(m, 20) ** 2))

    monkeypatch.setattr(pipeline, "simulate", late)
    bubbles._simulated.cache_clear()
    try:
        assert span_seconds("late", 2, 100, 1, {"F": 3.0, "B": 3.0, "W": 3.0}) == pytest.approx(3 * (1000 + 400))
        with pytest.raises(ValueError, match="needs 8 microbatches, got 7"):
            span_seconds("late", 4, 7, 1, DURATIONS)
    finally:
        bubbles._simulated.cache_clear()


def test_what_does_not_run_is_said_as_the_simulation_says_it():
    assert not simulates("interleaved", 4, 6, 2)
    with pytest.raises(ValueError, match="got 6 micro-batches over 4 stages"):
        span_seconds("interleaved", 4, 6, 2, DURATIONS)
