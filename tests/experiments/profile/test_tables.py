"""Tables of a profiled step, read off the golden trace."""

from dataclasses import replace

import pytest

from cs336_systems.experiments.profile.tables import (
    class_table,
    kernels_table,
    module_table,
    overhead_table,
    phase_table,
    stage_table,
)
from cs336_systems.profiling.traces.queries import times
from cs336_systems.report.tables import digits
from tests.experiments.profile.profiles import golden_profile


@pytest.fixture(scope="module")
def profile():
    return golden_profile()


def test_phases_stand_beside_the_clock(profile):
    frame = phase_table(profile).frame.set_index("phase")
    assert list(frame.index) == ["forward", "backward", "optimizer", "step"]
    assert frame["harness ms"].tolist() == ["5.50", "9.50", "0.500", "15.5"]
    found = times(profile.trace, profile.trace.instances("backward", inside="step"))
    assert frame.loc["backward", "GPU busy ms"] == digits(found.unioned_ms)
    assert frame.loc["backward", "GPU first to last ms"] == digits(found.projected_ms)
    assert frame.loc["backward", "operations"] == "204"


def test_passes_of_each_mode(profile):
    assert list(profile.passes()) == ["forward", "forward + backward", "full step"]
    inference = replace(profile, workload=replace(profile.workload, mode="forward"), unprofiled_ms={"forward": 1.0})
    assert list(inference.passes()) == ["inference forward"]


def test_top_kernels_and_the_rest_add_up(profile):
    table = kernels_table(profile, "forward + backward", top=5)
    assert len(table.frame) == 6
    assert table.frame["class"].iloc[0] == "matmul"
    assert sum(float(share) for share in table.frame["share %"]) == pytest.approx(100, abs=0.5)
    assert "kernels, copies and fills" in table.caption
    counts = [float(count) for count in table.frame["per step"]]
    assert sum(counts) == 114 + 204


def test_share_of_matmul_falls_from_forward_to_step(profile):
    frame = class_table([profile]).frame.set_index("pass")
    shares = frame["matmul %"].astype(float)
    assert shares["forward"] > 80
    assert shares["optimizer alone"] == 0
    assert shares["full step"] < shares["forward + backward"]
    percents = frame.filter(like="%").astype(float).sum(axis=1)
    assert (percents - 100).abs().max() < 0.5


def test_stages_with_their_ratios_to_softmax(profile):
    table = stage_table(profile)
    assert table is not None
    frame = table.frame.set_index(["direction", "stage"])
    assert len(frame) == 6
    assert frame.loc[("forward", "scores matmul"), "FLOPs / softmax"] == digits(2 * 64 / 5)
    assert frame.loc[("backward", "softmax"), "time / softmax"] == "1.00"
    spent = times(profile.trace, profile.trace.instances("values matmul", inside="step")).summed_ms
    assert frame.loc[("forward", "values matmul"), "GPU ms"] == digits(spent)


def test_a_fused_attention_has_no_stages(profile):
    ranges = profile.trace.ranges
    fused = replace(profile.trace, ranges=ranges[~ranges["name"].str.contains("softmax|matmul")])
    assert stage_table(replace(profile, trace=fused)) is None


def test_modules_with_layers_added_up(profile):
    frame = module_table(profile).frame.set_index("module")
    assert frame.loc["layers.*.ffn.w1", "calls"] == "2"
    assert frame.loc["layers.*.ffn.w1", "backward operations"] == "8"
    assert frame.loc["rotary", "backward GPU ms"] == "–"
    assert not any("#" in name or name in ("forward", "step") for name in frame.index)


def test_what_measuring_adds(profile):
    (line,) = overhead_table([profile]).frame.to_dict("records")
    assert line["annotated / unprofiled"] == "1.100"
    assert line["recorded / unprofiled"] == "1.200"
