"""Values come one step late and in order; on a GPU without the host waiting for the step that was just queued."""

import time

import pytest
import torch

from cs336_systems.pretraining.deferred import Deferred

CPU = torch.device("cpu")
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=ON_GPU)])
def test_each_step_comes_when_the_next_is_queued_and_the_last_when_asked_for(device):
    deferred = Deferred(device, ("loss", "norm"))
    pushed = [deferred.push(torch.tensor(i, device=device), torch.full((1,), i / 2, device=device)) for i in range(4)]
    last = deferred.flush()
    assert pushed[0] is None
    assert [done.values for done in (*pushed[1:], last)] == [{"loss": i, "norm": i / 2} for i in range(4)]
    assert deferred.flush() is None


def test_what_is_overwritten_by_the_next_step_was_copied():
    deferred, loss = Deferred(CPU, ("loss",)), torch.zeros((), requires_grad=True)
    deferred.push(loss)
    with torch.no_grad():
        loss += 1
    assert deferred.flush().values == {"loss": 0.0}


@pytest.mark.timing
def test_seconds_run_from_end_to_end_and_from_a_restart():
    deferred = Deferred(CPU, ("loss",))
    time.sleep(0.02)
    deferred.push(torch.zeros(()))
    time.sleep(0.03)
    first = deferred.push(torch.zeros(()))
    time.sleep(0.5)
    deferred.restart()
    second = deferred.push(torch.zeros(()))
    third = deferred.flush()
    assert 0.02 <= first.seconds < 0.3
    assert 0.03 <= second.seconds < 0.3
    assert third.seconds < 0.3


@pytest.mark.timing
def test_what_is_around_a_step_is_before_it_begins_and_not_in_it():
    deferred = Deferred(CPU, ("loss",))
    time.sleep(0.2)
    deferred.begin()
    time.sleep(0.02)
    deferred.push(torch.zeros(()))
    time.sleep(0.02)
    first, second = deferred.push(torch.zeros(())), deferred.flush()
    assert 0.2 <= first.around_seconds <= first.seconds - 0.02
    assert second.seconds >= 0.02 > second.around_seconds >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
