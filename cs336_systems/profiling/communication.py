"""The cost of communication in a step: recorded steps by kind of work, and waits timed without a profiler.

    record_phases_of_ranks(phases, model, rank, path)       # on all ranks; the ranks with a path write a trace
    metrics = communication_metrics(trace) + breakdown_metrics(trace)

``breakdown`` divides a recorded step by phase and by kind of work: every moment counts once, and the parts add up to
the step. A moment belongs to the first of ``KINDS`` that runs in it, on whatever stream: communication or an
optimizer beside a matmul costs nothing here, and the time that is booked to them is exposed. A phase begins on the
device with the first of its kernels that is not communication, which may run ahead.

``timed_waits`` answers whether each all-gather of FSDP finished before its unit needed it. On a GPU two events stand on
the computing stream, before the stream waits for the collective and after: the time between them is what the collective
was late, and is near zero if it was in time. On a CPU it is the time that the caller stood still. The waits are timed
from outside; the wrapped model does not know of them.

    with timed_waits(fsdp) as read_ms:
        ...                               # steps
        found = read_ms()                 # milliseconds of each wait of a unit for its weights
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pandas as pd
from torch import nn

from cs336_systems.config import PHASES
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import GroupState, ShardedGroup
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.clock import Stopwatch, time_phases_of_ranks
from cs336_systems.harness.record import Metric
from cs336_systems.model import TransformerBlock
from cs336_systems.profiling.ranges import annotate, ranged_phases
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.kernels import ATTENTION, CLASSES, COMMUNICATION, MATMUL, OPTIMIZER, kernel_class
from cs336_systems.profiling.traces.queries import (
    MS,
    Intervals,
    intersection,
    length,
    overlap,
    single_steps,
    slowdown,
    union,
)
from cs336_systems.profiling.traces.tables import Trace

LATE_MS = 0.02
"""Longer waits, in milliseconds, count as late: two events with nothing between them lie a few microseconds apart."""

_OWN = {MATMUL: "products", ATTENTION: "attention", OPTIMIZER: "optimizer", COMMUNICATION: "communication"}
IDLE = "idle"
KINDS = ("products", "attention", "elementwise", "optimizer", "communication", IDLE)
"""The kinds of work, in the order in which they claim a moment."""

_RECORDED_STEPS = 3
"""Enough to see whether a step is like its neighbours, and a small file."""


def record_phases_of_ranks(
    phases: Mapping[str, Callable[[], None]], model: nn.Module, rank: Rank, path: Path | None
) -> None:
    """Run one warm-up step and a few more on all ranks, recorded by torch.profiler on those that have a ``path``.

    The phases and the blocks of ``model`` are ranges in it; ranging every module would make the host late.
    """
    ranged = ranged_phases(phases, warmup=1)
    recording = kineto.recording(path, rank.device) if path else nullcontext()
    with annotate(model, TransformerBlock), recording:
        time_phases_of_ranks(ranged, rank, warmup=1, steps=_RECORDED_STEPS)


def communication_metrics(trace: Trace, alone: Trace | None = None) -> list[Metric]:
    """Communication of each recorded step: how long it ran, how much of it beside other kernels, the rest.

    A CPU's trace cannot tell: no metrics.

    Args:
        alone: the same steps without communication, to add what communication does to other kernels.
    """
    steps = single_steps(trace) if trace.has_gpu else []
    found = [overlap(trace, step) for step in steps]
    if not found or not all(total for total, _ in found):
        return []
    total, hidden = [whole for whole, _ in found], [part for _, part in found]
    shares = [100 * part / whole for part, whole in zip(hidden, total, strict=True)]
    waited = [whole - part for part, whole in zip(hidden, total, strict=True)]
    metrics = [
        Metric("communication", "ms of kernels per step, from the trace", total),
        Metric("hidden_share", "% of communication, from the trace", shares),
        Metric("waited", "ms per step in which only communication runs, from the trace", waited),
    ]
    if alone is not None:
        slowed = [slowdown(alone, trace, step) for step in steps]
        metrics.append(Metric("slowed", "ms of other kernels per step", slowed))
    return metrics


def breakdown_metrics(trace: Trace) -> list[Metric]:
    """The recorded steps by phase and kind of work; nothing for a CPU's trace."""
    parts = breakdown(trace) if trace.has_gpu else {}
    return [Metric(f"{phase}_{kind}", "ms of a recorded step", found) for (phase, kind), found in parts.items()]


def breakdown(trace: Trace) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each recorded step by phase and kind.

    Raises:
        TraceError: a phase is not in the recording.
    """
    kind_of = {label: _OWN.get(label, "elementwise") for label in CLASSES}
    samples_ms: dict[tuple[str, str], list[float]] = {(phase, kind): [] for phase in PHASES for kind in KINDS}
    for step in single_steps(trace):
        ops = trace.operations(step)
        kinds = ops["name"].map(kernel_class).map(kind_of)
        for phase, span in _spans(trace, step, ops).items():
            claimed = 0
            for n, kind in enumerate(KINDS[:-1], start=1):
                reached = length(intersection(union(ops[kinds.isin(KINDS[:n])]), span))
                samples_ms[phase, kind].append((reached - claimed) / MS)
                claimed = reached
            samples_ms[phase, IDLE].append((length(span) - claimed) / MS)
    return samples_ms


def _spans(trace: Trace, step: pd.DataFrame, ops: pd.DataFrame) -> dict[str, Intervals]:
    """The time of each phase on the device, one after the other, from the step's begin to its last kernel's end."""
    begins, end = [int(step["start"].iloc[0])], int(ops["end"].max())
    for phase in PHASES[1:]:
        launched = trace.operations(trace.during(trace.instances(phase), step))
        own = launched[launched["name"].map(kernel_class) != COMMUNICATION]
        begins.append(max(begins[-1], int(own["start"].min()) if len(own) else end))
    ends = [*begins[1:], end]
    return {
        phase: pd.DataFrame({"start": [start], "end": [end]}).to_numpy()
        for phase, start, end in zip(PHASES, begins, ends, strict=True)
    }


@contextmanager
def timed_waits(fsdp: FSDP) -> Iterator[Callable[[], list[float]]]:
    """Time every wait for a gather that is under way; yields a function that returns the milliseconds of those since
    it was last called, in order."""
    stopwatch = Stopwatch(fsdp.device)

    def timed(group: ShardedGroup, wait: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if group.state is GroupState.GATHERING:
                stopwatch.mark()
                wait()
                stopwatch.mark()

        return run

    def read_ms() -> list[float]:
        waits = stopwatch.laps_ms()[::2]
        stopwatch.events.clear()
        stopwatch.seconds.clear()
        return waits

    for group in fsdp.groups:
        group.wait = timed(group, group.wait)  # type: ignore[method-assign]
    try:
        yield read_ms
    finally:
        for group in fsdp.groups:
            del group.wait
