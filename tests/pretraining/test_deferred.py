"""Values come one step late and in order; on a GPU without the host waiting for the step that was just queued."""

import time

import pytest
import torch

from cs336_systems.pretraining import deferred as module
from cs336_systems.pretraining.deferred import Deferred
from tests.clock import Clock

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)])
def test_each_step_comes_when_the_next_is_queued_and_the_last_when_asked_for(device):
    """Its values were copied before the next step overwrites them."""
    deferred, loss = Deferred(device, ("loss", "norm")), torch.full((), -1.0, device=device)
    pushed = [deferred.push(loss.add_(1), torch.full((1,), i / 2, device=device)) for i in range(4)]
    last = deferred.flush()
    assert pushed[0] is None
    assert [done.values for done in (*pushed[1:], last)] == [{"loss": i, "norm": i / 2} for i in range(4)]
    assert deferred.flush() is None


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_seconds_run_from_end_to_end_and_from_a_restart_and_some_are_around_the_step(clock):
    deferred, nothing = Deferred(CPU, ("loss",)), torch.zeros(())
    clock.sleep(20)
    deferred.begin()
    clock.sleep(2)
    deferred.push(nothing)
    clock.sleep(3)
    first = deferred.push(nothing)
    clock.sleep(50)
    deferred.restart()
    clock.sleep(4)
    second = deferred.push(nothing)
    third = deferred.flush()
    assert [(done.seconds, done.around_seconds) for done in (first, second, third)] == [(22, 20), (3, 0), (4, 0)]


@pytest.mark.gpu
@pytest.mark.timing
def test_the_host_runs_ahead_of_the_device_and_seconds_are_the_devices():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def step():
        for _ in range(40):
            torch.mm(x, x)
        return x.flatten()[0]

    deferred = Deferred(device, ("loss",))
    deferred.push(step())
    deferred.flush()
    deferred.restart()
    begun = time.perf_counter()
    deferred.push(step())
    queued_s = time.perf_counter() - begun
    done = deferred.flush()
    assert queued_s < done.seconds / 2
    assert done.seconds == pytest.approx(time.perf_counter() - begun, rel=0.3)
