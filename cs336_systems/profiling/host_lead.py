"""Does the device wait for the host? How far the host is ahead where blocks begin, measured without a profiler.

    lead = HostLead(model.layers, device)
    lead.begin()
    ...                                   # steps
    passes = lead.end()                   # over the blocks, forward and backward, in order

Where a block's forward begins on the host, and where its backward does, an event is queued behind all that was queued
before. The host's lead is the time from there until the device comes to the event. While the device waits for the
host, kernels run as they come, and the lead is shorter than a block: such blocks are counted as late.

A profiler slows the host and may tell another story (profiles/distributed.md); an event takes it some microseconds.

Limits: blocks that a CUDA graph replays are not seen, nor those that a backward computes again.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cs336_systems.distributed.fsdp_schedule import inside_backward


@dataclass(frozen=True)
class Pass:
    """Blocks that ran one after the other, all forward or all backward.

    Attributes:
        leads_ms: how far the host was ahead as each block began.
        blocks_ms: how long the device took from each block's beginning to the next one's; one fewer.
    """

    backward: bool
    leads_ms: Sequence[float]
    blocks_ms: Sequence[float]

    @property
    def lead_ms(self) -> float:
        """The median."""
        return median(self.leads_ms)

    @property
    def n_late(self) -> int:
        """Blocks of which the host was less than one ahead; of a single block nobody knows."""
        lasted = [*self.blocks_ms, *self.blocks_ms[-1:]]
        return sum(lead < block for lead, block in zip(self.leads_ms, lasted, strict=False))


@dataclass(frozen=True)
class _Mark:
    backward: bool
    host_s: float
    event: torch.cuda.Event


class HostLead:
    """Watches blocks from outside, between ``begin`` and ``end``.

    Args:
        blocks: modules that return a tensor, as those of a model.
        device: where they run, on its current stream; of a CPU, which is the host, nothing is told.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._blocks, self._device = list(blocks), device
        self._hooks: list[RemovableHandle] = []
        self._marks: list[_Mark] = []

    def begin(self) -> None:
        """Watch from the next block on."""
        for block in self._blocks if self._device.type == "cuda" else ():
            self._hooks += [block.register_forward_pre_hook(self._begins), block.register_forward_hook(self._ends)]

    def end(self) -> list[Pass]:
        """Leave the blocks as they were, and wait for the device; returns the passes since ``begin``, if that was."""
        if not self._hooks:
            return []
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        torch.cuda.synchronize(self._device)
        now = self._mark(backward=False)
        now.event.synchronize()
        marks, self._marks = self._marks, []
        passes = []
        for backward, found in groupby(marks, key=lambda mark: mark.backward):
            own = list(found)
            # Both clocks are read against the last event, to which the device came at once.
            device_ms = [-mark.event.elapsed_time(now.event) for mark in own]
            host_ms = [1000 * (mark.host_s - now.host_s) for mark in own]
            leads = [there - here for there, here in zip(device_ms, host_ms, strict=True)]
            passes.append(Pass(backward, leads, [later - earlier for earlier, later in pairwise(device_ms)]))
        return passes

    def _begins(self, block: nn.Module, args: Any) -> None:
        if not inside_backward():
            self._marks.append(self._mark(backward=False))

    def _ends(self, block: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad and not inside_backward():
            output.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._hooks:
            self._marks.append(self._mark(backward=True))

    def _mark(self, *, backward: bool) -> _Mark:
        event = torch.cuda.Event(enable_timing=True)
        mark = _Mark(backward, time.perf_counter(), event)
        event.record(torch.cuda.current_stream(self._device))
        return mark
