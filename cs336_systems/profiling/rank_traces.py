"""Recordings of steps that several ranks take together, and what they say of communication."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.ranks import time_phases_of_ranks
from cs336_systems.harness.record import Metric
from cs336_systems.profiling.ranges import ranged_phases
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.queries import overlap
from cs336_systems.profiling.traces.tables import Trace

_RECORDED_STEPS = 3


def record_phases_of_ranks(phases: Mapping[str, Callable[[], None]], rank: Rank, path: Path) -> None:
    """Run one warm-up step and a few more on all ranks, recorded by torch.profiler on rank 0 to ``path``."""
    ranged = ranged_phases(phases, warmup=1)
    with kineto.recording(path, rank.device) if rank.rank == 0 else nullcontext():
        time_phases_of_ranks(ranged, rank, warmup=1, steps=_RECORDED_STEPS)


def communication_metrics(trace: Trace) -> list[Metric]:
    """From a GPU's trace: communication, and how much of it ran beside other kernels. A CPU's trace cannot tell."""
    found = overlap(trace) if trace.has_gpu else None
    if found is None or found.empty:
        return []
    total, hidden = found["communication_ms"].sum(), found["hidden_ms"].sum()
    return [
        Metric("communication", "ms of kernels per step, from the trace", [total]),
        Metric("hidden_share", "% of communication, from the trace", [100 * hidden / total]),
    ]
