"""Stages against all divisions of small models, and spans of few micro-batches against simulations of all."""

from itertools import product
from types import SimpleNamespace

import pytest

from cs336_systems.case import SCHEDULES
from cs336_systems.config import resolve_size
from cs336_systems.costs.fsdp import model_units
from cs336_systems.costs.parallelism import bubbles, pipeline
from cs336_systems.costs.parallelism.bubbles import Stage, alive, divide, least_bubble, simulates, span_seconds

DURATIONS = {"F": 2.0, "B": 2.7, "W": 1.5}


@pytest.mark.parametrize(("embedding", "head"), [(0.0, 0.0), (0.1, 1.2), (0.4, 2.6)])
@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_no_division_has_a_faster_slowest_stage(n_stages, embedding, head):
    for n_layers in range(n_stages, 13):
        found = divide(n_layers, n_stages, embedding, head)
        counts = [found[0].n_layers, *[each.n_layers for each in found[1:-1]] * (n_stages - 2), found[-1].n_layers]
        assert sum(counts) >= n_layers
        least = min(
            max(own + embedding * (i == 0) + head * (i == n_stages - 1) for i, own in enumerate(each))
            for each in product(range(1, n_layers + 1), repeat=n_stages)
            if sum(each) == n_layers
        )
        assert max(stage.cost(embedding, head) for stage in found) == pytest.approx(least)


def test_a_head_takes_the_place_of_blocks():
    assert [stage.n_layers for stage in divide(80, 4, 0.0, 1.2)] == [21, 21, 19]
    assert divide(80, 1, 0.0, 1.2) == (Stage(80, True, True),)
    assert [stage.n_layers for stage in divide(28, 16, 0.15, 3.0)] == [3, 4, 1]
    with pytest.raises(ValueError, match="8 layers cannot be divided into 9 stages"):
        divide(8, 9, 0.0, 0.0)


@pytest.mark.parametrize("size", ["llama3-8b", "qwen2.5-1.5b"])
def test_stages_hold_the_parameters_of_the_model(size):
    """A tied head is on the last stage, too."""
    config = resolve_size(size)
    three = [Stage(10, True, False), Stage(config.n_layers - 15, False, False), Stage(5, False, True)]
    tied = config.vocab_size * config.d_model if config.tie_embeddings else 0
    assert sum(stage.n_parameters(config) for stage in three) == config.n_parameters + tied
    assert Stage(config.n_layers, True, True).n_parameters(config) == config.n_parameters
    assert Stage(config.n_layers, True, True).units(config) == model_units(config)
    assert sum(len(stage.units(config)) for stage in three) == len(model_units(config)) + bool(tied)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_micro_batches_tell_the_span_of_many(schedule):
    n_compared = 0
    for n_stages, chunks, m in product((2, 3, 8), (1, 2, 3), (1, 2, 7, 8, 9, 24, 40, 64)):
        if simulates(schedule, n_stages, m, chunks):
            whole = pipeline.simulate(schedule, n_stages, m, chunks=chunks, durations=DURATIONS)
            assert span_seconds(schedule, n_stages, m, chunks, DURATIONS) == pytest.approx(whole.span)
            assert alive(schedule, n_stages, m, chunks) == pytest.approx(whole.peak_activations)
            assert least_bubble(schedule, n_stages, chunks, DURATIONS) <= whole.bubble + 1e-9
            n_compared += 1
    assert n_compared >= 8


def test_a_rhythm_that_begins_late_is_waited_for(monkeypatch):
    """A schedule that runs eight micro-batches or more, whose span grows by a step of its own up to the twentieth."""

    def late(schedule, n_stages, m, *, chunks, durations=None):
        if m < 8:
            raise ValueError(f"needs 8 microbatches, got {m}")
        return SimpleNamespace(span=float(10 * m + min(m, 20) ** 2), peak_activations=(float(min(m, 9)),))

    monkeypatch.setattr(pipeline, "simulate", late)
    bubbles._simulated.cache_clear()
    try:
        assert span_seconds("late", 2, 100, 1, {"F": 3.0, "B": 3.0, "W": 3.0}) == pytest.approx(3 * (1000 + 400))
        assert alive("late", 2, 100, 1) == (9.0,)
        with pytest.raises(ValueError, match="needs 8 microbatches, got 7"):
            span_seconds("late", 4, 7, 1, DURATIONS)
    finally:
        bubbles._simulated.cache_clear()


def test_what_does_not_run_is_said_as_the_simulation_says_it():
    assert not simulates("interleaved", 4, 6, 2)
    with pytest.raises(ValueError, match="got 6 micro-batches over 4 stages"):
        span_seconds("interleaved", 4, 6, 2, DURATIONS)
