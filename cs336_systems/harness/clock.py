"""Timing: events on a GPU, ``perf_counter`` on a CPU; every sample is kept.

Two questions, two functions:

* ``time_phases`` for a training step: the phases of one step are timed inside that step, so forward, backward and
  optimizer add up to the whole. The device is idle when a step begins and is waited for when it ends, so each sample
  stands alone; the host's launch latency is inside, as it is in training.
* ``time_kernel`` for one operation: repetitions are queued without waiting, and the L2 cache is overwritten before
  each, so that no warm cache is part of the sample. That takes the device some 0.1 ms; what the host takes longer than
  that to launch is in the sample, unless the device is told to wait for it (``host_first``).

On a GPU both read CUDA events, which the device itself stamps between kernels (the committed samples step by 32 ns).
Compilation and autotuning happen in warm-up steps, whose times are returned beside the samples and never among them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from cs336_systems.config import phase_of

WHOLE = "step"
"""Name under which ``time_phases`` reports the time from the first phase's start to the last one's end."""

_L2_FLUSH_BYTES = 256 * 1024**2
"""Twice the largest L2 of any GPU in hardware.py (B200: 126 MB)."""

_CYCLES_PER_S = 2e9
"""Of a GPU, at least what it does."""


@dataclass
class PhaseTimes:
    """Milliseconds per phase, one sample per step, and the whole steps of the warm-up."""

    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    warmup_ms: list[float] = field(default_factory=list)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Marks on the device's time line; ``laps_ms`` waits, then returns the times between successive marks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[torch.cuda.Event] = []
        self.seconds: list[float] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record(torch.cuda.current_stream(self.device))
        else:
            self.seconds.append(time.perf_counter())

    def laps_ms(self) -> list[float]:
        synchronize(self.device)
        if self.device.type == "cuda":
            return [start.elapsed_time(end) for start, end in pairwise(self.events)]
        return [(end - start) * 1e3 for start, end in pairwise(self.seconds)]


def time_phases(
    phases: Mapping[str, Callable[[], None]], *, device: torch.device, warmup: int, steps: int
) -> PhaseTimes:
    """Run the phases in order, ``warmup`` times unrecorded and then ``steps`` times recorded.

    Parts of one phase (``config.phase_of``) add up to its sample. A step that is one phase may be called ``WHOLE``.

    Raises:
        ValueError: ``warmup`` is negative or ``steps`` is not positive.
    """
    if warmup < 0 or steps < 1:
        raise ValueError(f"warmup must be at least 0 and steps at least 1, got {warmup} and {steps}")
    times = PhaseTimes({name: [] for name in (*map(phase_of, phases), WHOLE)})
    for i in range(warmup + steps):
        synchronize(device)
        stopwatch = Stopwatch(device)
        stopwatch.mark()
        for phase in phases.values():
            phase()
            stopwatch.mark()
        laps = stopwatch.laps_ms()
        if i < warmup:
            times.warmup_ms.append(sum(laps))
            continue
        spent = dict.fromkeys(times.samples_ms, 0.0)
        for name, lap in zip(phases, laps, strict=True):
            spent[phase_of(name)] += lap
        spent[WHOLE] = sum(laps)
        for name, ms in spent.items():
            times.samples_ms[name].append(ms)
    return times


def time_kernel(
    operation: Callable[[], object],
    *,
    device: torch.device,
    warmup: int = 10,
    samples: int = 50,
    host_first: bool = False,
    prepare: Callable[[], object] | None = None,
) -> list[float]:
    """Milliseconds of one operation, ``samples`` of them, each with a cold L2 cache on a GPU.

    Args:
        host_first: let a GPU spin until the host has launched all of the operation, so that kernels alone are timed.
        prepare: runs before each call, outside of its time.

    Raises:
        ValueError: ``warmup`` is negative or ``samples`` is not positive.
    """
    if warmup < 0 or samples < 1:
        raise ValueError(f"warmup must be at least 0 and samples at least 1, got {warmup} and {samples}")
    prepare = prepare or (lambda: None)
    for _ in range(warmup):
        prepare()
        operation()
    synchronize(device)
    host_first = host_first and device.type == "cuda"
    spin_cycles = _launch_cycles(operation) if host_first else 0
    flush = torch.empty(_L2_FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    stopwatches = []
    for _ in range(samples):
        prepare()
        if flush is not None:
            flush.zero_()
        if host_first:
            torch.cuda._sleep(spin_cycles)
        stopwatch = Stopwatch(device)
        stopwatch.mark()
        operation()
        stopwatch.mark()
        stopwatches.append(stopwatch)
    return [stopwatch.laps_ms()[0] for stopwatch in stopwatches]


def _launch_cycles(operation: Callable[[], object]) -> int:
    """Clock cycles that last twice as long as the host takes to launch the operation, and 0.1 ms besides."""
    start = time.perf_counter()
    operation()
    return int(_CYCLES_PER_S * (2 * (time.perf_counter() - start) + 1e-4))
