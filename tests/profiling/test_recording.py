"""One workload timed, recorded and summed up: its metrics against their own samples."""

from dataclasses import replace
from statistics import median

import pytest

from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling.recording import HOWS, ROUNDS, profile_workload
from tests.profiling.test_workload import TINY


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    recorded, path = replace(TINY, steps=1), tmp_path_factory.mktemp("raw") / "step.json.gz"
    return {metric.name: metric.samples for metric in profile_workload(TINY, recorded, "kineto", path)}


def test_every_phase_is_timed_plain_annotated_and_recorded(metrics):
    for how, n in zip(HOWS, (ROUNDS * TINY.steps, ROUNDS * TINY.steps, 1), strict=True):
        found = [len(metrics[f"{how}_{phase}"]) for phase in ("forward", "backward", "optimizer", WHOLE)]
        assert found == [n] * 4


def test_what_measuring_adds_is_the_quotient_of_medians(metrics):
    plain, annotated, recorded = (median(metrics[f"{how}_{WHOLE}"]) for how in HOWS)
    assert metrics["annotation_ratio"] == [annotated / plain]
    assert metrics["recording_ratio"] == [recorded / plain]


def test_a_cpu_has_no_idle_share(metrics):
    assert "idle" not in metrics
    assert metrics["operations"][0] > 0
    assert 0 < metrics["matmul_share"][0] < 100


def test_an_unknown_profiler_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown profiler 'perf': known are nsys, kineto"):
        profile_workload(TINY, TINY, "perf", tmp_path / "x")
