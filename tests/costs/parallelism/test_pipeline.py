"""Simulated schedules do every operation once, after its inputs, and idle as long as the closed forms say."""

from itertools import pairwise

import pytest

from cs336_systems.costs.parallelism.pipeline import SCHEDULES, UNIT, Operation, Timeline, simulate

DURATIONS = [UNIT, {"F": 1.0, "B": 1.25, "W": 0.75}]
SHAPES = [(1, 3), (2, 2), (4, 12)]


def run(schedule: str, stages: int, microbatches: int, durations=UNIT, chunks: int = 2) -> Timeline:
    thin = chunks if schedule == "interleaved" else 1
    return simulate(schedule, stages, microbatches, chunks=thin, durations=durations)


every_run = pytest.mark.parametrize("schedule", SCHEDULES)
every_shape = pytest.mark.parametrize(("stages", "microbatches"), SHAPES)


@every_run
@every_shape
@pytest.mark.parametrize("durations", DURATIONS)
def test_every_operation_once_after_its_inputs_and_none_at_the_same_time(schedule, stages, microbatches, durations):
    """The model's parts in order are p chunks 0, then p chunks 1, ...: forward goes up that order, backward down."""
    timeline = run(schedule, stages, microbatches, durations)
    kinds = ("F", "B", "W") if schedule == "zb-h1" else ("F", "BW")
    wanted = {Operation(k, i, c) for k in kinds for i in range(microbatches) for c in range(timeline.chunks)}
    times = {}
    for stage in timeline.operations:
        done = [timed.operation for timed in stage]
        assert len(done) == len(set(done)) and set(done) == wanted
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(stage))
        assert sum(timed.end - timed.start for timed in stage) == pytest.approx(timeline.busy)
        for timed in stage:
            part = timed.operation.chunk * stages + timed.stage
            times[timed.operation.kind[0], timed.operation.microbatch, part] = timed
    last = stages * timeline.chunks - 1
    for (kind, i, part), timed in times.items():
        if kind == "F":
            needed = [("F", i, part - 1)] if part else []
        elif kind == "B":
            needed = [("F", i, part)] + ([("B", i, part + 1)] if part < last else [])
        else:
            needed = [("B", i, part)]
        for key in needed:
            assert times[key].end <= timed.start + 1e-9, (key, timed)


@every_shape
@pytest.mark.parametrize("durations", DURATIONS)
def test_bubbles_are_those_of_the_closed_forms(stages, microbatches, durations):
    whole, behind = sum(durations.values()), stages - 1
    zero = durations["F"] + durations["B"] - durations["W"]
    for schedule, expected in {"gpipe": behind * whole, "1f1b": behind * whole, "zb-h1": behind * zero}.items():
        timeline = run(schedule, stages, microbatches, durations)
        assert timeline.bubble == pytest.approx(expected)
        assert timeline.bubble_fraction == pytest.approx(expected / (expected + microbatches * whole))
    for chunks in (2, 3, 4):
        if microbatches % stages == 0:
            timeline = run("interleaved", stages, microbatches, durations, chunks)
            assert timeline.bubble == pytest.approx(behind * whole / chunks)


@every_shape
def test_activations_alive(stages, microbatches):
    p, m = stages, microbatches
    assert run("gpipe", p, m).peak_activations == (m,) * p
    assert run("1f1b", p, m).peak_activations == tuple(min(m, p - s) for s in range(p))
    assert run("zb-h1", p, m).peak_activations == (min(m, p),) * p
    assert run("interleaved", p, m).peak_activations == tuple(
        min(m, (2 * (p - s - 1) + (2 - 1) * p + 1) / 2) for s in range(p)
    )
    for schedule in SCHEDULES:
        timeline = run(schedule, p, m)
        assert all(timeline.activations(stage)[-1][1] == 0 for stage in range(p)), "nothing is alive at the end"


def test_bad_input():
    for schedule, stages, microbatches, chunks in (
        *(("2f2b", 2, 2, 1), ("1f1b", 0, 2, 1), ("1f1b", 2, 2, 2)),
        *(("interleaved", 2, 2, 1), ("interleaved", 4, 6, 2)),
    ):
        with pytest.raises(ValueError, match="2f2b|got 0 and 2|got 2|got 1|got 6"):
            simulate(schedule, stages, microbatches, chunks=chunks)
    with pytest.raises(ValueError, match="durations must be positive"):
        run("1f1b", 2, 2, UNIT | {"F": 0.0})
