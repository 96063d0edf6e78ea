"""The profiled program: in this process, and as the child that a profiler is given."""

import json
import sys
from dataclasses import replace

import pytest

from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling import workload
from cs336_systems.profiling.workload import PreparedStep, Workload

TINY = Workload(size="tiny", batch_size=2, context_length=16, warmup=1, steps=2, seed=3)


@pytest.mark.parametrize("mode", ["forward", "backward", "step"])
def test_plain_and_annotated_steps_alternate_on_one_model(mode):
    prepared = PreparedStep(replace(TINY, mode=mode))
    for annotated in (False, True, False):
        times = prepared.run(1, 2, annotated=annotated)
        assert [len(samples) for samples in times.samples_ms.values()] == [2] * len(times.samples_ms)
        assert len(times.warmup_ms) == 1
    assert WHOLE in times.samples_ms


def test_the_command_runs_it_and_prints_its_times(monkeypatch, capsys):
    interpreter, flag, module, argument = TINY.command()
    assert (interpreter, flag, module) == (sys.executable, "-m", workload.__name__)
    monkeypatch.setattr(sys, "argv", [module, argument])
    workload.main()
    times = json.loads(capsys.readouterr().out)
    assert list(times) == ["forward", "backward", "optimizer", WHOLE]
    assert all(len(samples) == TINY.steps for samples in times.values())


def test_a_loss_that_is_not_finite_is_an_error():
    prepared = PreparedStep(TINY)
    prepared.step.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="loss is nan"):
        prepared.run(0, 1, annotated=False)
