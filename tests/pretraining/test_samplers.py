"""Readings of the GPU's state beside steps."""

import threading

import pytest
import torch

from cs336_systems.pretraining import samplers
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import GpuState, Message
from cs336_systems.pretraining.samplers import GpuSampler
from tests.pretraining.runs import Kept

CUDA = torch.device("cuda")


def state(step, device):
    return GpuState(step, 1980.0, 3201.0, 500.0, 50.0, "", 1e9)


def test_every_so_many_steps_are_read_on_a_gpu(monkeypatch):
    monkeypatch.setattr(samplers, "read_gpu_state", state)
    kept = Kept()
    for device in (CUDA, torch.device("cpu")):
        for step in (0, 1, 9, 10, 11, 20):
            with GpuSampler(RunLog(kept), device, every=10) as sampler:
                sampler.step(step)
    assert [record.step for record in kept] == [0, 10, 20]


def test_a_slow_reading_holds_nobody_up_and_lets_the_next_pass(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(samplers, "read_gpu_state", lambda *where: answer.wait(30) and state(*where))
    kept = Kept()
    with GpuSampler(RunLog(kept), CUDA, every=1) as sampler:
        for step in range(5):
            sampler.step(step)
        assert kept == []
        answer.set()
    assert [record.step for record in kept] == [0]


def test_a_gpu_that_says_nothing_is_told_once(monkeypatch):
    import pynvml

    calls = []

    def refuse(*where):
        calls.append(where)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(samplers, "read_gpu_state", refuse)
    kept = Kept()
    with GpuSampler(RunLog(kept), CUDA, every=1) as sampler:
        for step in range(3):
            sampler.step(step)
            while not sampler._reading.done():
                pass
    assert [(type(record), record.level) for record in kept] == [(Message, "warning")]
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_says_all_of_it():
    kept = Kept()
    with GpuSampler(RunLog(kept), CUDA, every=1) as sampler:
        sampler.step(7)
    reading = kept[0]
    assert reading.step == 7
    assert reading.sm_mhz > 100
    assert reading.memory_used_bytes > 0
