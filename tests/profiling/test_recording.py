"""The profiled program: in this process, as the child that a profiler is given, and summed up in metrics."""

import json
import sys
from dataclasses import replace
from statistics import median

import pytest

from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling import recording
from cs336_systems.profiling.recording import HOWS, ROUNDS, RunnableWorkload, Workload, profile_workload

TINY = Workload(size="tiny", batch_size=2, context_length=16, warmup=1, steps=2, seed=3)
PHASES = ["forward", "backward", "optimizer", WHOLE]


@pytest.mark.parametrize("mode", ["forward", "backward", "step"])
def test_plain_and_annotated_steps_alternate_on_one_model(mode):
    runnable = RunnableWorkload(replace(TINY, mode=mode))
    for annotated in (False, True, False):
        times = runnable.run(1, 2, annotated=annotated)
        assert [len(samples) for samples in times.samples_ms.values()] == [2] * len(times.samples_ms)
        assert len(times.warmup_ms) == 1


def test_the_command_runs_it_and_prints_its_times(monkeypatch, capsys):
    interpreter, flag, module, argument = TINY.command()
    assert (interpreter, flag, module) == (sys.executable, "-m", recording.__name__)
    monkeypatch.setattr(sys, "argv", [module, argument])
    recording.main()
    assert {phase: len(found) for phase, found in json.loads(capsys.readouterr().out).items()} == dict.fromkeys(
        PHASES, 2
    )


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


def test_an_unknown_profiler_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'perf'"):
        profile_workload(TINY, TINY, "perf", tmp_path / "x")
