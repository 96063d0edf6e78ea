"""Questions to traces whose answers are known, because they are made up; sets of time against sets of integers."""

import random

import numpy as np
import pandas as pd
import pytest

from cs336_systems.profiling.traces.queries import (
    Intervals,
    intersection,
    kernel_table,
    length,
    limits,
    n_steps,
    range_table,
    times,
    union,
)

MS = 1_000_000
CALLER, AUTOGRAD = 1, 2
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def ms(*ops: tuple) -> list[tuple]:
    """Operations (name, start, end, thread, launch[, stream]) in milliseconds."""
    return [(name, round(s * MS), round(e * MS), tid, round(at * MS), *stream) for name, s, e, tid, at, *stream in ops]


def ms_ranges(*rows: tuple[str, float, float, int]) -> list[tuple]:
    return [(name, round(start * MS), round(end * MS), tid) for name, start, end, tid in rows]


@pytest.fixture
def two_steps(trace_of):
    """Each step of 10 ms: two products and an addition that overlap in part, then a gap, then backward."""
    ops, ranges = [], [("warmup", -10.0, -1.0, CALLER), ("forward", -9.0, -2.0, CALLER)]
    for t in (0, 100):
        ops += [
            ("gemm", t + 1, t + 3, CALLER, t + 0.5),
            ("gemm", t + 3, t + 4, CALLER, t + 0.6),
            ("elementwise_kernel", t + 2, t + 5, CALLER, t + 0.7, 8),
            ("softmax", t + 7, t + 9, AUTOGRAD, t + 6.5),
        ]
        ranges += [
            ("step", t, t + 9, CALLER),
            ("forward", t + 0.1, t + 1, CALLER),
            ("backward", t + 6, t + 8, CALLER),
            ("layer (backward)", t + 6.1, t + 7, AUTOGRAD),
        ]
    ops.append(("gemm", -8, -7, CALLER, -8.5))
    return trace_of(ms(*ops), ms_ranges(*ranges))


def test_three_durations_of_a_range(two_steps):
    found = times(two_steps, two_steps.instances("forward", inside="step"))
    assert found.calls == 1
    assert found.operations == 3
    assert found.host_ms == pytest.approx(0.9)
    assert (found.summed_ms, found.unioned_ms, found.projected_ms) == (6, 4, 4)
    whole = times(two_steps, two_steps.instances("step"))
    assert (whole.summed_ms, whole.unioned_ms, whole.projected_ms) == (8, 6, 8)


def test_warm_up_is_left_out(two_steps):
    assert n_steps(two_steps) == 2
    table = range_table(two_steps).set_index("range")
    assert list(table.index) == ["step", "forward", "backward", "layer (backward)"]
    assert table["calls"].tolist() == [1, 1, 1, 1]
    assert table["summed_ms"].tolist() == [8, 6, 2, 2]


def test_kernels_with_counts_and_shares(two_steps):
    table = kernel_table(two_steps, two_steps.instances("step"))
    assert table["name"].tolist() == ["elementwise_kernel", "gemm", "softmax"]
    assert table["kernel_class"].tolist() == ["elementwise", "matmul", "softmax"]
    assert table["count"].tolist() == [1, 2, 1]
    assert table["total_ms"].tolist() == [3, 3, 2]
    assert table["mean_us"].tolist() == [3000, 1500, 2000]
    assert table["share_percent"].tolist() == pytest.approx([37.5, 37.5, 25])


def test_a_steps_time_is_split_over_what_binds_it(two_steps):
    found = limits(two_steps)
    assert (found.compute_ms, found.memory_ms, found.communication_ms) == (3, 3, 0)
    assert found.step_ms == 9
    assert found.idle_ms == 3
    assert found.idle_percent == pytest.approx(100 / 3)


def test_verdicts(trace_of):
    for kernel, busy, verdict in (
        ("gemm", 8, "compute"),
        ("elementwise_kernel", 8, "memory"),
        ("gemm", 2, "overhead"),
        (ALL_REDUCE, 7, "communication"),
    ):
        trace = trace_of(ms((kernel, 10 - busy, 10, CALLER, 0.5)), ms_ranges(("step", 0, 10, CALLER)))
        assert limits(trace).verdict == verdict
    assert limits(trace, 1000.0).verdict == "overhead"
    assert limits(trace, 1.0).idle_ms == 0


def covered(draw: random.Random) -> tuple[Intervals, set[int]]:
    """The union of random spans, by our means and as a set of integers."""
    starts = [draw.randint(0, 60) for _ in range(draw.randint(0, 12))]
    spans = [(start, start + draw.randint(1, 15)) for start in starts]
    instants = {t for start, end in spans for t in range(start, end)}
    return union(pd.DataFrame(spans, columns=["start", "end"], dtype=np.int64)), instants


def instants_of(intervals: Intervals) -> set[int]:
    return {t for start, end in intervals for t in range(start, end)}


def test_sets_of_time_are_sets_of_instants():
    draw = random.Random(0)
    for _ in range(50):
        (ours, instants), (theirs, others) = covered(draw), covered(draw)
        assert instants_of(ours) == instants
        assert length(ours) == len(instants)
        assert (ours[1:, 0] > ours[:-1, 1]).all()
        assert instants_of(intersection(ours, theirs)) == instants & others
