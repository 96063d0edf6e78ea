"""Does the device wait for the host? How far the host is ahead where blocks begin, measured without a profiler.

    lead = HostLead(model.layers, device)
    lead.begin()
    ...                                   # steps
    passes = lead.end()                   # over the blocks, forward and backward, in order

When the host begins a block's forward or backward, it queues an event behind all earlier work. The host's lead is the
time from then until the device reaches the event. While the device waits for the host, kernels run as they are launched
and the lead is shorter than a block: such blocks are counted as late.

A profiler slows the host and may tell another story (profiles/distributed.md); an event costs the host some
microseconds.

Limits: blocks that a CUDA graph replays or a backward recomputes are not seen; several forwards in a row count as one
pass.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cs336_systems.distributed.fsdp_schedule import inside_backward
from cs336_systems.harness.clock import Stopwatch, synchronize


@dataclass(frozen=True)
class Pass:
    """Blocks that ran one after the other, all forward or all backward.

    Attributes:
        leads_ms: how far the host was ahead as each block began, one for each block.
        blocks_ms: how long the device took from each block's beginning to the next one's; one fewer.
    """

    backward: bool
    leads_ms: Sequence[float]
    blocks_ms: Sequence[float]

    @property
    def lead_ms(self) -> float:
        """Median lead of the host, in ms."""
        return median(self.leads_ms)

    @property
    def n_late(self) -> int:
        """Blocks at which the host was less than one block ahead; 0 for a single block, whose duration is unknown."""
        lasted = [*self.blocks_ms, *self.blocks_ms[-1:]]
        return sum(lead < block for lead, block in zip(self.leads_ms, lasted, strict=False))


class HostLead:
    """Watches blocks from outside, between ``begin`` and ``end``.

    Args:
        blocks: modules that return a tensor, such as a model's layers.
        device: the device they run on, on its current stream. A CPU is the host itself and gives no passes.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._blocks, self._device = list(blocks), device
        self._hooks: list[RemovableHandle] = []
        self._stopwatch = Stopwatch(device)
        self._marks: list[tuple[bool, float]] = []
        """For each mark of the stopwatch, whether it belongs to a backward, and the host's seconds."""

    def begin(self) -> None:
        """Watch from the next block on."""
        for block in self._blocks if self._device.type == "cuda" else ():
            self._hooks += [block.register_forward_pre_hook(self._begins), block.register_forward_hook(self._ends)]

    def end(self) -> list[Pass]:
        """Detach from the blocks, wait for the device, and return the passes since ``begin``."""
        if not self._hooks:
            return []
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        synchronize(self._device)
        self._mark(backward=False)  # the device comes to it at once: against it both clocks are read
        device_ms = list(accumulate(self._stopwatch.laps_ms(), initial=0.0))
        leads = [device_ms[i] - device_ms[-1] - 1000 * (s - self._marks[-1][1]) for i, (_, s) in enumerate(self._marks)]
        passes = []
        for backward, found in groupby(range(len(leads) - 1), key=lambda i: self._marks[i][0]):
            own = list(found)
            blocks = [device_ms[later] - device_ms[earlier] for earlier, later in pairwise(own)]
            passes.append(Pass(backward, [leads[i] for i in own], blocks))
        self._stopwatch, self._marks = Stopwatch(self._device), []
        return passes

    def _begins(self, block: nn.Module, args: Any) -> None:
        if not inside_backward():
            self._mark(backward=False)

    def _ends(self, block: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad and not inside_backward():
            output.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._hooks:
            self._mark(backward=True)

    def _mark(self, *, backward: bool) -> None:
        self._marks.append((backward, time.perf_counter()))
        self._stopwatch.mark()
