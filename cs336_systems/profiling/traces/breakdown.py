"""Where the time of a step goes, by phase and by kind of work: every moment counts once, so the parts add up to it.

    for part in breakdown(trace):                       # phase, kind, milliseconds of each recorded step
        print(part.phase, part.kind, part.samples_ms)

A moment belongs to the first of ``KINDS`` that runs in it, on whatever stream: what communication or an optimizer does
beside matrix products costs nothing here, and what they are seen with is their exposed time. A phase begins on the
device with the first of its kernels that are no communication, which may run ahead.
"""

from dataclasses import dataclass

import pandas as pd

from cs336_systems.profiling.ranges import STEP
from cs336_systems.profiling.traces.intervals import Intervals, intersection, length, union
from cs336_systems.profiling.traces.kernels import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    MATMUL,
    OPTIMIZER,
    kernel_class,
)
from cs336_systems.profiling.traces.queries import MS
from cs336_systems.profiling.traces.tables import Trace

_OWN = {MATMUL: "products", ATTENTION: "attention", OPTIMIZER: "optimizer", COMMUNICATION: "communication"}
IDLE = "idle"
KINDS = ("products", "attention", "elementwise", "optimizer", "communication", IDLE)
"""Of work, in the order in which they claim a moment."""


@dataclass(frozen=True)
class Part:
    """The share of one phase that belongs to one kind."""

    phase: str
    kind: str
    samples_ms: list[float]
    """Of each recorded step."""


def breakdown(trace: Trace, phases: tuple[str, ...] = ("forward", "backward", "optimizer")) -> list[Part]:
    """Every recorded step divided by phase and kind; the phases in the order in which they run.

    Raises:
        TraceError: a phase is not in the recording.
    """
    kind_of = {label: _OWN.get(label, "elementwise") for label in CLASSES}
    samples: dict[tuple[str, str], list[float]] = {(phase, kind): [] for phase in phases for kind in KINDS}
    steps = trace.instances(STEP)
    for index in steps.index:
        window = steps.loc[[index]]
        ops = trace.operations(window)
        kinds = ops["name"].map(kernel_class).map(kind_of)
        for phase, span in _spans(trace, window, ops, phases).items():
            claimed = 0
            for n, kind in enumerate(KINDS[:-1], start=1):
                reached = length(intersection(union(ops[kinds.isin(KINDS[:n])]), span))
                samples[phase, kind].append((reached - claimed) / MS)
                claimed = reached
            samples[phase, IDLE].append((length(span) - claimed) / MS)
    return [Part(phase, kind, found) for (phase, kind), found in samples.items()]


def _spans(trace: Trace, step: pd.DataFrame, ops: pd.DataFrame, phases: tuple[str, ...]) -> dict[str, Intervals]:
    """The time of each phase on the device, one after the other, from the step's begin to its last kernel's end."""
    begins, end = [int(step["start"].iloc[0])], int(ops["end"].max())
    for phase in phases[1:]:
        launched = trace.operations(trace.during(trace.instances(phase), step))
        own = launched[launched["name"].map(kernel_class) != COMMUNICATION]
        begins.append(max(begins[-1], int(own["start"].min()) if len(own) else end))
    ends = [*begins[1:], end]
    return {
        phase: pd.DataFrame({"start": [start], "end": [end]}).to_numpy()
        for phase, start, end in zip(phases, begins, ends, strict=True)
    }
