"""What recorded steps of ranks say: a sample for each step, and every moment of a step counted once."""

import pytest

from cs336_systems.profiling.communication import breakdown, communication_metrics
from cs336_systems.profiling.traces.queries import limits
from tests.profiling.traces.test_queries import ALL_REDUCE, CALLER, ms, ms_ranges

STEPS_MS = (0, 100, 200)
PHASES = [("step", 0, 30, CALLER), ("forward", 0, 4, CALLER), ("backward", 4, 8, CALLER), ("optimizer", 8, 9, CALLER)]


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
    found = {metric.name: metric.samples for metric in communication_metrics(beside, alone)}
    assert found == {
        "communication": [6, 4, 4],
        "hidden_share": [pytest.approx(100 * 4 / 6), 100, 50],
        "waited": [2, 0, 2],
        "slowed": [1, 2, 2],
    }
    assert list(found)[:3] == [metric.name for metric in communication_metrics(beside)]
    assert communication_metrics(alone, alone) == []
    assert limits(beside).communication_ms == pytest.approx(4 / 3)


def parts(trace):
    return {part: samples_ms for part, samples_ms in breakdown(trace).items() if any(samples_ms)}


def test_every_moment_counts_once_for_the_first_kind_that_runs_in_it(trace_of):
    trace = trace_of(
        ms(
            ("gemm", 1, 6, CALLER, 1),
            ("swiglu_forward_kernel", 6, 7, CALLER, 2),
            (ALL_REDUCE, 5, 9, CALLER, 5, 9),  # launched by backward, it runs ahead of it
            ("hopper_backward_kernel", 8, 12, CALLER, 6),
            ("update_kernel", 11, 15, CALLER, 7, 10),  # on a stream of its own
            ("gemm", 16, 18, CALLER, 7),
            ("update_kernel", 20, 24, CALLER, 8),
        ),
        ms_ranges(*PHASES),
    )
    found = parts(trace)
    assert found == {
        ("forward", "products"): [5],
        ("forward", "elementwise"): [1],
        ("forward", "communication"): [1],
        ("forward", "idle"): [1],
        ("backward", "attention"): [4],
        ("backward", "optimizer"): [3],
        ("backward", "products"): [2],
        ("backward", "idle"): [3],
        ("optimizer", "optimizer"): [4],
    }
    assert sum(samples[0] for samples in found.values()) == 24


def test_a_recorded_step_adds_up(golden_kineto):
    found = breakdown(golden_kineto)
    steps = golden_kineto.instances("step")
    for i, (index, step) in enumerate(steps.iterrows()):
        end = golden_kineto.operations(steps.loc[[index]])["end"].max()
        assert sum(samples_ms[i] for samples_ms in found.values()) == pytest.approx((end - step["start"]) / 1e6)
