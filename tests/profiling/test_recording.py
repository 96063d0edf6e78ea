"""The profiled program: in this process, as the child that a profiler is given, and summed up in metrics."""

from dataclasses import replace
from statistics import median

import pytest

from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling.recording import HOWS, ROUNDS, RunnableWorkload, Workload, profile_workload

TINY = Workload(size="tiny", batch_size=2, context_length=16, warmup=1, steps=2, seed=3)
PHASES = ["forward", "backward", "optimizer", WHOLE]


def test_a_loss_that_is_not_finite_is_an_error():
    runnable = RunnableWorkload(TINY)
    runnable.step.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        runnable.run(0, 1, annotated=False)


def test_the_metrics_hold_the_clocks_samples_and_what_measuring_adds(tmp_path):
    found = profile_workload(TINY, replace(TINY, steps=1), "kineto", tmp_path / "raw" / "step.json.gz")
    metrics = {metric.name: metric.samples for metric in found}
    for how, n in zip(HOWS, (ROUNDS * TINY.steps, ROUNDS * TINY.steps, 1), strict=True):
        assert [len(metrics[f"{how}_{phase}"]) for phase in PHASES] == [n] * 4
    plain, annotated, recorded = (median(metrics[f"{how}_{WHOLE}"]) for how in HOWS)
    assert metrics["annotation_ratio"] == [annotated / plain]
    assert metrics["recording_ratio"] == [recorded / plain]
    assert "idle" not in metrics, "a CPU has no idle share"
    assert metrics["operations"][0] > 0
    assert 0 < metrics["matmul_share"][0] < 100
