"""Timing: events on a GPU, ``perf_counter`` on a CPU; every sample is kept.

Two questions, two functions:

* ``time_phases`` for a training step: the phases of one step are timed inside that step, so forward, backward and
  optimizer add up to the whole. The device is idle when a step begins and is waited for when it ends, so each sample
  stands alone; the host's launch latency is inside, as it is in training.
* ``time_kernel`` for one operation: repetitions are enqueued without waiting, and the L2 cache is overwritten before
  each, so that no sample has a warm cache. That takes the device some 0.1 ms; if the host takes longer than that to
  launch, the excess is in the sample, unless the device is made to wait for the host (``host_first``).

On a GPU both read CUDA events, which the device itself stamps between kernels (the committed samples step by 32 ns).
Compilation and autotuning happen in warm-up steps, whose times are returned beside the samples and never among them.

Shares of a limit need the rates that this machine reaches: a datasheet's peak assumes clocks that a power limit may not
allow, and an unknown device has no datasheet at all. ``measure_ceilings`` times a large matmul and a large copy with
the same clock, on random data (zeros draw less power and run faster).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.config import Precision, phase_of
from cs336_systems.distributed.process_group import Rank, check_same_across_ranks
from cs336_systems.hardware import GIB
from cs336_systems.harness.record import Metric
from cs336_systems.training.precision import matmul_dtype, matmul_precision

WHOLE = "step"
"""Name under which ``time_phases`` reports the time from the first phase's start to the last one's end."""

_L2_FLUSH_BYTES = 256 * 1024**2
"""Twice the largest L2 of any GPU in hardware.py (B200: 126 MB)."""

_CYCLES_PER_S = 2e9
"""Clock cycles per second by which a spin is sized: at least what any GPU here does."""

_CEILING_COUNTS: dict[str, dict[str, Any]] = {"cuda": {"warmup": 5, "samples": 20}, "cpu": {"warmup": 3, "samples": 10}}
"""Repetitions of the large matmul and copy, by device type: a CPU takes seconds for them."""


@dataclass
class PhaseTimes:
    """Milliseconds per phase, one sample per step, and the whole steps of the warm-up."""

    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    warmup_ms: list[float] = field(default_factory=list)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all enqueued work."""
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


def time_phases_of_ranks(
    phases: Mapping[str, Callable[[], None]], rank: Rank, *, warmup: int, steps: int
) -> PhaseTimes:
    """``time_phases`` on all ranks at once; each sample is that of the slowest rank, the same on every rank.

    Steps begin together, after a barrier that no sample holds. The maximum is taken for each phase and for the whole
    step by itself, so phases whose slowest ranks differ add up to more than the step.

    Raises:
        ValueError: the ranks disagree about phases, ``warmup`` or ``steps``, or as ``time_phases``.
    """
    check_same_across_ranks([*phases, WHOLE, warmup, steps], "phases and step counts")
    if warmup < 0 or steps < 1:
        raise ValueError(f"warmup must be at least 0 and steps at least 1, got {warmup} and {steps}")
    laps_ms: list[list[float]] = []
    for _ in range(warmup + steps):
        dist.barrier()
        step = time_phases(phases, device=rank.device, warmup=0, steps=1).samples_ms
        laps_ms.append([samples[0] for samples in step.values()])
    slowest = torch.tensor(laps_ms, dtype=torch.float64, device=rank.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    columns = slowest.T.tolist()
    samples = {name: column[warmup:] for name, column in zip(step, columns, strict=True)}
    return PhaseTimes(samples, columns[-1][:warmup])


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
    """Clock cycles that last twice as long as the host takes to launch the operation, plus 0.1 ms."""
    start = time.perf_counter()
    operation()
    return int(_CYCLES_PER_S * (2 * (time.perf_counter() - start) + 1e-4))


def measure_ceilings(precision: Precision, device: torch.device) -> list[Metric]:
    """Rates of a square matmul in the precision's matmul dtype (side 8192, CPU: 2048) and of ``measure_copy``."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(matmul_dtype(precision)) for _ in range(2))
    with matmul_precision(precision):
        matmul_ms = time_kernel(lambda: a @ b, device=device, **_CEILING_COUNTS[device.type])
    matmul = Metric("matmul_ceiling", "TFLOP/s", [2 * size**3 / ms / 1e9 for ms in matmul_ms])
    return [matmul, Metric("copy_ceiling", "GB/s", measure_copy(device))]


def measure_copy(device: torch.device) -> list[float]:
    """Bytes read plus bytes written, in 1e9 bytes per second, of a copy of 2 GiB (CPU: 256 MiB)."""
    source = torch.randn(2**29 if device.type == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    copy_ms = time_kernel(lambda: target.copy_(source), device=device, **_CEILING_COUNTS[device.type])
    return [2 * source.nbytes / ms / 1e6 for ms in copy_ms]


def check_loss(loss: torch.Tensor | None) -> None:
    """Raise FloatingPointError unless a step has left a finite loss."""
    assert loss is not None
    if not math.isfinite(value := loss.item()):
        raise FloatingPointError(f"loss is {value}")


def phase_metrics(times: PhaseTimes) -> list[Metric]:
    """The milliseconds of each phase, and of whole steps of the warm-up if there were any."""
    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    return metrics + ([Metric("warmup_step", "ms", times.warmup_ms)] if times.warmup_ms else [])


def rate(name: str, unit: str, amount: float, samples_ms: Sequence[float]) -> Metric:
    return Metric(name, unit, [amount / (ms / 1e3) for ms in samples_ms], derived=True)


def step_rates(tokens: int, flops: float, peak: float | None, samples_ms: Sequence[float]) -> list[Metric]:
    """Tokens per second, model TFLOP/s, and their share of the device's peak (FLOP/s) where that is known."""
    metrics = [
        rate("tokens_per_s", "1/s", tokens, samples_ms),
        rate("model_tflops", "TFLOP/s", flops / 1e12, samples_ms),
    ]
    return metrics + ([rate("mfu", "% of datasheet peak, causal", 100 * flops / peak, samples_ms)] if peak else [])


def in_gib(**n_bytes: float) -> list[Metric]:
    """Bytes as metrics in GiB."""
    return [Metric(name, "GiB", [value / GIB]) for name, value in n_bytes.items()]
