"""Golden traces of one program, recorded on an H200 by both profilers: the readers agree, backward is attributed."""

import pytest

from cs336_systems.profiling.ranges import BACKWARD
from cs336_systems.profiling.traces.kernels import MATMUL
from cs336_systems.profiling.traces.queries import class_times, limits, range_table, times


def test_both_hold_the_same_ranges_and_operations(golden_nsys, golden_kineto):
    ours, theirs = (range_table(trace).set_index("range") for trace in (golden_nsys, golden_kineto))
    theirs = theirs[~theirs.index.str.contains("#")]
    assert set(ours.index) == set(theirs.index)
    assert len(ours) > 60
    for column in ("calls", "operations"):
        assert ours[column].to_dict() == theirs[column].to_dict()
    for name, expected in ours["summed_ms"].items():
        assert theirs.loc[name, "summed_ms"] == pytest.approx(expected, rel=0.02), name


@pytest.mark.parametrize("fixture", ["golden_nsys", "golden_kineto"])
def test_backward_holds_the_matmuls_of_autograds_thread(fixture, request):
    """By threads alone the caller's backward range would hold a few fills: its matmuls are launched by another."""
    trace = request.getfixturevalue(fixture)
    backward = trace.instances("backward", inside="step")
    held = trace.operations(backward)
    caller = backward["tid"].iloc[0]
    assert (held["launch_tid"] != caller).mean() > 0.9
    own = held[held["launch_tid"] == caller]
    assert (own["end"] - own["start"]).sum() < 0.1 * (held["end"] - held["start"]).sum()
    forward = class_times(trace, trace.instances("forward", inside="step"))
    assert class_times(trace, backward)[MATMUL] == pytest.approx(2 * forward[MATMUL], rel=0.1)


@pytest.mark.parametrize("fixture", ["golden_nsys", "golden_kineto"])
def test_every_operation_of_a_step_belongs_to_one_phase(fixture, request):
    trace = request.getfixturevalue(fixture)
    phases = [times(trace, trace.instances(name, inside="step")) for name in ("forward", "backward", "optimizer")]
    whole = times(trace, trace.instances("step"))
    assert sum(phase.operations for phase in phases) == whole.operations
    assert sum(phase.summed_ms for phase in phases) == pytest.approx(whole.summed_ms)
    found = limits(trace)
    assert found.verdict == "compute"
    parts = found.compute_ms + found.memory_ms + found.communication_ms + found.idle_ms
    assert parts == pytest.approx(found.step_ms)


@pytest.mark.parametrize("fixture", ["golden_nsys", "golden_kineto"])
def test_modules_hold_their_parts_in_both_directions(fixture, request):
    table = range_table(request.getfixturevalue(fixture)).set_index("range")["summed_ms"]
    for suffix in ("", BACKWARD):
        parts = ("ln1", "attn", "ln2", "ffn")
        inside = sum(table[f"layers.0.{part}{suffix}"] for part in parts)
        assert 0.9 * table[f"layers.0{suffix}"] < inside <= table[f"layers.0{suffix}"] * (1 + 1e-9)
        blocks = sum(table[f"layers.{i}{suffix}"] for i in range(2))
        assert blocks < table[f"TransformerLM{suffix}"]
    assert table["layers.1.ffn.w1" + BACKWARD] == pytest.approx(2 * table["layers.1.ffn.w1"], rel=0.1)
    assert table["token_embeddings" + BACKWARD] > 0
