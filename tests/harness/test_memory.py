"""Memory that is free, and memory that was taken, in fresh processes."""

import os

import psutil
import pytest
import torch

from cs336_systems.harness import memory
from cs336_systems.harness.sweep import run_sweep
from cs336_systems.kernels import host_memory
from tests.harness.cells import Cell, measure

CPU = torch.device("cpu")


@pytest.mark.parametrize(("headroom", "expected"), [(None, 10_000), (4_000, 4_000), (50_000, 10_000)])
def test_the_tighter_of_machine_and_control_group_counts(monkeypatch, headroom, expected):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10_000}))
    monkeypatch.setattr(host_memory, "control_group_headroom", lambda: headroom)
    assert memory.free_bytes(CPU) == expected
    assert memory.cublas_workspace_bytes(CPU) == 0


def run(*whats, share=None):
    cells = [Cell(what) for what in whats]
    return list(run_sweep("b", cells, measure, row_file=None, timeout_s=600, share=share))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel cannot reset the high-water mark"
)
def test_the_meter_starts_when_it_is_made():
    [outcome] = run("peak after a larger one")
    assert outcome.median("peak") == pytest.approx(200, rel=0.2), outcome.message


def test_a_process_that_has_measured_a_cell_cannot_tell_the_next_ones_peak():
    first, second = run("peak", "peak", share=lambda cell: True)
    assert first.median("peak") == pytest.approx(200, rel=0.2)
    assert (second.status, second.median("peak"), second.median("calls")) == ("ok", None, 2)


@pytest.mark.gpu
def test_the_meter_and_the_driver_see_a_tensor_on_a_gpu():
    device = torch.device("cuda")
    meter = memory.PeakMeter(device)
    before, free = torch.cuda.memory_allocated(device), memory.free_bytes(device)
    block = torch.empty(200 * 1024**2, dtype=torch.int8, device=device)
    assert memory.free_bytes(device) <= free
    del block
    assert meter.peak_bytes() - before == 200 * 1024**2
    meter = memory.PeakMeter(device)
    requested = meter.requested_bytes()
    odd = torch.empty(2**20 + 1, dtype=torch.int8, device=device)
    assert (meter.requested_bytes() - requested, meter.peak_bytes() - before) == (odd.nbytes, 2**20 + 512)


@pytest.mark.gpu
def test_the_meter_counts_allocations_that_need_what_is_cached():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    size = memory.free_bytes(device) * 6 // 10
    meter = memory.PeakMeter(device)
    torch.empty(size, dtype=torch.int8, device=device)
    assert meter.allocation_retries() == 0
    torch.empty(size + 2**30, dtype=torch.int8, device=device)  # the cached block is too small for it, and in its way
    assert meter.allocation_retries() == 1
    torch.cuda.empty_cache()
