"""Readings of the GPU's state beside steps."""

import pytest
import torch

from cs336_systems.pretraining import gpu_state
from cs336_systems.pretraining.gpu_state import GpuSampler
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import GpuState, Message
from tests.pretraining.runs import Kept

CUDA = torch.device("cuda")


def test_every_tenth_step_is_read_on_a_gpu_and_one_that_says_nothing_is_told_once(monkeypatch):
    import pynvml

    monkeypatch.setattr(gpu_state, "read_gpu_state", lambda step, _: GpuState(step, 1.0, 2.0, 3.0, 4.0, "", 5.0))
    kept = Kept()
    for device in (CUDA, torch.device("cpu")):
        sampler = GpuSampler(RunLog(kept), device)
        for step in (0, 1, 9, 10, 11, 20):
            sampler.step(step)
    assert [record.step for record in kept] == [0, 10, 20]

    def refuse(*where):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(gpu_state, "read_gpu_state", refuse)
    kept = Kept()
    sampler = GpuSampler(RunLog(kept), CUDA)
    for step in (0, 10, 20):
        sampler.step(step)
    assert [(type(record), record.level) for record in kept] == [(Message, "warning")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_says_all_of_it():
    kept = Kept()
    GpuSampler(RunLog(kept), CUDA).step(10)
    assert kept[0].step == 10 and kept[0].sm_mhz > 100 and kept[0].memory_used_bytes > 0
