"""Recordings of steps that several ranks take together, and what they say of communication, a sample for each step."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from torch import nn

from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.ranks import time_phases_of_ranks
from cs336_systems.harness.record import Metric
from cs336_systems.model import TransformerBlock
from cs336_systems.profiling.ranges import STEP, annotate, ranged_phases
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.breakdown import breakdown
from cs336_systems.profiling.traces.queries import overlap, slowdown
from cs336_systems.profiling.traces.tables import Trace

_RECORDED_STEPS = 3


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
        alone: of the same steps without communication; what communication then does to other kernels is told, too.
    """
    steps = single_steps(trace) if trace.has_gpu else []
    streams = [overlap(step) for step in steps]
    if not streams or any(found.empty for found in streams):
        return []
    total = [float(found["communication_ms"].sum()) for found in streams]
    hidden = [float(found["hidden_ms"].sum()) for found in streams]
    shares = [100 * part / whole for part, whole in zip(hidden, total, strict=True)]
    waited = [whole - part for part, whole in zip(hidden, total, strict=True)]
    metrics = [
        Metric("communication", "ms of kernels per step, from the trace", total),
        Metric("hidden_share", "% of communication, from the trace", shares),
        Metric("waited", "ms per step in which only communication runs, from the trace", waited),
    ]
    if alone is None:
        return metrics
    classes = [slowdown(alone, step) for step in steps]
    slowed = [float((found["beside_ms"] - found["alone_ms"]).sum()) for found in classes]
    added = [float(found["added_ms"].sum()) for found in classes]
    return [
        *metrics,
        Metric("slowed", "ms of other kernels per step", slowed),
        Metric("added_kernels", "ms of other kernels per step", added),
    ]


def breakdown_metrics(trace: Trace) -> list[Metric]:
    """The recorded steps by phase and kind of work (``traces/breakdown.py``); of a CPU's trace, nothing."""
    parts = breakdown(trace) if trace.has_gpu else []
    return [Metric(f"{part.phase}_{part.kind}", "ms of a recorded step", part.samples_ms) for part in parts]


def single_steps(trace: Trace) -> list[Trace]:
    """The trace once for each recorded step, as if it were the only one."""
    steps = trace.instances(STEP).index
    return [replace(trace, ranges=trace.ranges.drop(index=steps.difference([step]))) for step in steps]
