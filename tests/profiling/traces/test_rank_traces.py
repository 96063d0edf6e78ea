"""What recordings of ranks say of communication: a sample for each recorded step, of made-up traces."""

import pytest

from cs336_systems.profiling.rank_traces import communication_metrics, single_steps
from cs336_systems.profiling.traces.queries import n_steps, overlap
from tests.profiling.traces.test_queries import ALL_REDUCE, CALLER, ms, ms_ranges

STEPS_MS = (0, 100, 200)


@pytest.fixture
def steps(trace_of):
    """A trace of three steps after a warm-up, given (name, start, end[, stream]) of each."""

    def build(*of_steps):
        ranges = [("warmup", -50, -30, CALLER), *(("step", t, t + 50, CALLER) for t in STEPS_MS)]
        ops = [
            (name, t + start, t + end, CALLER, t, *stream)
            for t, step in zip((-50, *STEPS_MS), (of_steps[0], *of_steps), strict=True)
            for name, start, end, *stream in step
        ]
        return trace_of(ms(*ops), ms_ranges(*ranges))

    return build


def test_each_recorded_step_is_a_sample(steps):
    alone = steps(*[[("gemm", 1, 5), ("gemm", 5, 6)]] * 3)
    beside = steps(
        [("gemm", 1, 6), (ALL_REDUCE, 2, 8, 9), ("gemm", 10, 11)],
        [("gemm", 1, 7), (ALL_REDUCE, 3, 7, 9), ("gemm", 10, 11)],
        [("gemm", 1, 6), (ALL_REDUCE, 4, 8, 9), ("elementwise_kernel", 8, 9), ("gemm", 10, 12)],
    )
    found = {metric.name: metric for metric in communication_metrics(beside, alone)}
    expected = {
        "communication": [6, 4, 4],
        "hidden_share": [100 * 4 / 6, 100, 50],
        "waited": [2, 0, 2],
        "slowed": [1, 2, 2],
        "added_kernels": [0, 0, 1],
    }
    assert {name: metric.samples for name, metric in found.items()} == {
        name: pytest.approx(samples) for name, samples in expected.items()
    }
    assert found["slowed"].statistics()["median"] == 2
    assert list(expected)[:3] == [metric.name for metric in communication_metrics(beside)]


def test_without_communication_there_is_nothing_to_say(steps):
    alone = steps(*[[("gemm", 1, 5)]] * 3)
    assert communication_metrics(alone, alone) == []


def test_single_steps_hold_what_theirs_launched(golden_kineto, steps):
    assert [n_steps(step) for step in single_steps(golden_kineto)] == [1] * n_steps(golden_kineto)
    trace = steps(*[[("gemm", 1, 4), (ALL_REDUCE, 1, end, 9)] for end in (2, 3, 4)])
    assert [float(overlap(step)["hidden_ms"].iloc[0]) for step in single_steps(trace)] == [1, 2, 3]
