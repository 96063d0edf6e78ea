"""How far the host is ahead: on a made-up device whose clock is known, and on a GPU that is given much or little."""

import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.profiling.host_lead import HostLead, Pass


@dataclass
class Clock:
    """A host's, and until when the device is busy with what it was given; milliseconds."""

    now: float = 0.0
    busy_until: float = 0.0

    def launch(self, host_ms, device_ms):
        self.now += host_ms
        self.busy_until = max(self.busy_until, self.now) + device_ms


@pytest.fixture
def clock(monkeypatch):
    """What ``torch.cuda`` and ``time`` say of it; the clocks of host and device begin at different numbers."""
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = 1e6 + max(clock.busy_until, clock.now)

        def synchronize(self):
            clock.now = max(clock.now, self.at - 1e6)

        def elapsed_time(self, end):
            return end.at - self.at

    def synchronize(device):
        clock.now = max(clock.now, clock.busy_until)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now / 1000)
    return clock


class Block(nn.Module):
    """Costs host and device so much in forward, and twice as much in backward."""

    def __init__(self, clock, host_ms, device_ms):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.cost = clock, host_ms, device_ms

    def forward(self, x):
        return Costs.apply(x * self.weight, *self.cost)


class Costs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, host_ms, device_ms):
        ctx.cost = clock, host_ms, device_ms
        clock.launch(host_ms, device_ms)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        clock, host_ms, device_ms = ctx.cost
        clock.launch(2 * host_ms, 2 * device_ms)
        return gradient, None, None, None


def passes_of(clock, host_ms, device_ms, run=lambda model, x: model(x).backward()):
    model = nn.Sequential(*(Block(clock, host_ms, device_ms) for _ in range(4)))
    lead = HostLead(model, torch.device("cuda"))
    run(model, torch.ones((), requires_grad=True))  # not watched
    lead.begin()
    clock.now = clock.busy_until = clock.now + 100
    run(model, torch.ones((), requires_grad=True))
    found = lead.end()
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model)
    return found


def test_a_fast_host_runs_ahead(clock):
    forward, backward = passes_of(clock, host_ms=1, device_ms=4)
    assert (forward.backward, backward.backward) == (False, True)
    assert forward.leads_ms == pytest.approx([0, 4, 7, 10])  # the device waits for the first launch
    assert forward.blocks_ms == pytest.approx([5, 4, 4])
    assert backward.leads_ms == pytest.approx([13, 19, 25, 31])
    assert backward.blocks_ms == pytest.approx([8, 8, 8])
    assert (forward.n_late, backward.n_late) == (1, 0)
    assert backward.lead_ms == pytest.approx(22)


def test_a_slow_host_is_late_everywhere(clock):
    forward, backward = passes_of(clock, host_ms=4, device_ms=1)
    assert forward.leads_ms == pytest.approx([0, 1, 1, 1])
    assert backward.leads_ms == pytest.approx([1, 2, 2, 2])
    assert (forward.n_late, backward.n_late) == (4, 4)


def test_recomputed_blocks_are_not_seen_and_no_gradient_means_no_backward(clock):
    forward, backward = passes_of(clock, 1, 4, lambda model, x: checkpoint(model, x, use_reentrant=False).backward())
    assert (forward.backward, backward.backward, len(forward.leads_ms)) == (False, True, 4)
    (forward,) = passes_of(clock, 1, 4, lambda model, x: torch.no_grad()(model)(x))
    assert len(forward.leads_ms) == 4


def test_a_cpu_gives_no_passes_and_a_single_block_is_not_late():
    model = nn.Sequential(nn.Linear(2, 2))
    lead = HostLead(model, torch.device("cpu"))
    lead.begin()
    model(torch.ones(2)).sum().backward()
    assert lead.end() == []
    assert Pass(False, [0.0], []).n_late == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_behind_where_it_has_much_to_do():
    device = torch.device("cuda")
    medians = []
    for size in (8192, 8):
        model = nn.Sequential(*(nn.Linear(size, size, device=device, dtype=torch.bfloat16) for _ in range(20)))
        x = torch.zeros(size, size, device=device, dtype=torch.bfloat16)
        model(x).sum().backward()
        lead = HostLead(model, device)
        torch.cuda.synchronize()
        lead.begin()
        model(x).sum().backward()
        forward, backward = lead.end()
        assert len(forward.leads_ms) == len(backward.leads_ms) == 20
        medians.append((forward.lead_ms, backward.lead_ms))
    (much, much_backward), (little, _) = medians
    assert much > 5
    assert much_backward > 10
    assert -0.05 < little < 1
