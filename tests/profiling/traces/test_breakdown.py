"""A step divided by phase and kind: every moment once."""

import pytest

from cs336_systems.profiling.traces.breakdown import KINDS, breakdown
from tests.profiling.traces.test_queries import ALL_REDUCE, CALLER, ms, ms_ranges

RANGES = [("step", 0, 30, CALLER), ("forward", 0, 4, CALLER), ("backward", 4, 8, CALLER), ("optimizer", 8, 9, CALLER)]


def parts(trace):
    return {(part.phase, part.kind): part.samples_ms for part in breakdown(trace) if any(part.samples_ms)}


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
        ms_ranges(*RANGES),
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


def test_a_phase_without_kernels_takes_no_time(trace_of):
    trace = trace_of(ms(("gemm", 1, 6, CALLER, 1), ("gemm", 6, 9, CALLER, 5)), ms_ranges(*RANGES))
    assert parts(trace) == {("forward", "products"): [5], ("forward", "idle"): [1], ("backward", "products"): [3]}


def test_a_recorded_step_adds_up(golden_kineto):
    found = breakdown(golden_kineto)
    assert [part.kind for part in found[: len(KINDS)]] == list(KINDS)
    totals = [sum(part.samples_ms[step] for part in found) for step in range(2)]
    steps = golden_kineto.instances("step")
    for total, (index, _) in zip(totals, steps.iterrows(), strict=True):
        window = steps.loc[[index]]
        ops = golden_kineto.operations(window)
        assert total == pytest.approx((ops["end"].max() - window["start"].iloc[0]) / 1e6)
