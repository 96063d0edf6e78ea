"""The common tables, and the rule that gives an operation to a range."""

import pandas as pd
import pytest

from cs336_systems.profiling.traces.tables import (
    COPY,
    TraceError,
    depths,
    make_trace,
    require_kernels,
)

CALLER, AUTOGRAD, STRANGER = 10, 11, 12


def names(trace, range_name: str) -> list[str]:
    return trace.operations(trace.instances(range_name))["name"].tolist()


@pytest.fixture
def step(trace_of):
    """Forward launched by the caller; backward by autograd's thread while the caller waits inside its range."""
    ops = [
        ("forward kernel", 100, 200, CALLER, 10),
        ("loss gradient", 200, 210, CALLER, 52),
        ("matmul", 300, 400, AUTOGRAD, 61),
        ("last", 400, 500, AUTOGRAD, 80),
        ("update", 500, 550, CALLER, 95),
    ]
    ranges = [
        ("step", 0, 100, CALLER),
        ("forward", 5, 40, CALLER),
        ("backward", 50, 90, CALLER),
        ("layer (backward)", 60, 70, AUTOGRAD),
    ]
    return trace_of(ops, ranges)


def test_a_range_holds_what_its_thread_launched_in_it(step):
    """The forward kernel runs after the forward range has ended, which does not matter."""
    assert names(step, "forward") == ["forward kernel"]


def test_the_callers_backward_holds_what_autograds_thread_launched(step):
    assert names(step, "backward") == ["loss gradient", "matmul", "last"]
    assert names(step, "step") == ["forward kernel", "loss gradient", "matmul", "last", "update"]


def test_a_range_of_another_thread_holds_its_own_launches_only(trace_of):
    ops = [("own", 10, 20, AUTOGRAD, 5), ("foreign", 20, 30, STRANGER, 6), ("caller's", 30, 40, CALLER, 7)]
    trace = trace_of(ops, [("step", 0, 10, CALLER), ("layer (backward)", 4, 9, AUTOGRAD)])
    assert names(trace, "layer (backward)") == ["own"]


def test_depths_are_per_thread_and_siblings_share_them():
    rows = [(1, 1, 0, 100), (1, 1, 0, 50), (1, 2, 10, 20), (1, 1, 50, 60), (1, 1, 100, 110)]
    assert depths(pd.DataFrame(rows, columns=["pid", "tid", "start", "end"])) == [0, 1, 0, 1, 0]


def test_a_cuda_trace_without_kernels_is_an_error(step):
    require_kernels(step)
    copies = make_trace(step.ops.assign(kind=COPY), step.ranges, step.source)
    with pytest.raises(TraceError, match="holds no kernels"):
        require_kernels(copies)
