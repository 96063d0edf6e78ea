"""Simulates a pipeline schedule: its time, its bubble and its memory.

Every stage runs its list (``schedules.py``), each operation as early as the stage and its inputs allow. Parts of the
model may have different durations, because some also have the embedding or the head.

The bubble is the idle time per stage between the first operation on any stage and the last. Its fraction is relative to
that whole time, whereas the papers divide by the time of the work ("bubble / ideal"). GPipe and 1F1B have the same
bubble, and 1F1B needs less memory. For a smaller bubble, interleaving sends (v p - 1) / (p - 1) times as much, and
zero-bubble schedules hold the operands of W for longer. A bubble hardly depends on the number of micro-batches m, so
its fraction falls nearly as 1/m.

Limits: activations are counted in micro-batches of a whole stage, as if all parts kept the same amount, and W needed as
much as B; ``rank_memory.py`` counts bytes.

    timeline = simulate("zb-h1", stages=4, microbatches=8)
    timeline.bubble_fraction, timeline.peak_activations
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cs336_systems.costs.parallelism.schedules import UNIT, Operation, Schedule, check_durations, make_schedule


@dataclass(frozen=True)
class TimedOperation:
    """An operation with the stage it ran on, from ``start`` to ``end``."""

    stage: int
    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with times."""

    plan: Schedule
    operations: tuple[tuple[TimedOperation, ...], ...]
    """For each stage, its operations in order of time."""

    @property
    def span(self) -> float:
        """Time from the start of the first operation on any stage to the end of the last."""
        return max(timed.end for stage in self.operations for timed in stage)

    @property
    def busy(self) -> tuple[float, ...]:
        """Work of each stage."""
        return tuple(sum(timed.end - timed.start for timed in stage) for stage in self.operations)

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """Share of the whole time in which each stage does nothing."""
        return tuple(1 - busy / self.span for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time, on average over the stages, between the first operation on any stage and the last."""
        return self.span * self.bubble_fraction

    @property
    def bubble_fraction(self) -> float:
        """The bubble divided by ``span``."""
        return sum(self.idle_fractions) / self.plan.stages

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each stage, the most micro-batches whose activations are alive at once, in units of a whole stage."""
        return tuple(max(alive for _, alive in self.activations(stage)) for stage in range(self.plan.stages))

    def activations(self, stage: int) -> list[tuple[float, float]]:
        """(time, micro-batches alive) after each change on a stage: from the start of F to the end of W."""
        changes = [
            (timed.start, 1) if timed.operation.kind == "F" else (timed.end, -1)
            for timed in self.operations[stage]
            if timed.operation.kind != "B"
        ]
        alive, found = 0, []
        for at, change in sorted(changes):
            alive += change
            found.append((at, alive / self.plan.chunks))
        return found


def simulate(
    schedule: str,
    stages: int,
    microbatches: int,
    *,
    chunks: int = 1,
    durations: Mapping[str, float] | Sequence[Mapping[str, float]] = UNIT,
) -> Timeline:
    """Make a schedule and simulate it.

    Args:
        chunks: as in ``make_schedule``.
        durations: of F, B and W of one micro-batch, either on a whole stage, the same for all stages, or on each part
            of the model, from input to output.

    Raises:
        ValueError: as ``make_schedule``; durations are not positive, or not one for each part.
    """
    return timed(make_schedule(schedule, stages, microbatches, chunks, durations), durations)


def timed(plan: Schedule, durations: Mapping[str, float] | Sequence[Mapping[str, float]] = UNIT) -> Timeline:
    """Simulate a given schedule; arguments as of ``simulate``.

    Raises:
        ValueError: durations are not positive, or not one for each part.
        RuntimeError: stages deadlock.
    """
    n_parts = plan.stages * plan.chunks
    if isinstance(durations, Mapping):
        durations = [{kind: time / plan.chunks for kind, time in durations.items()}] * n_parts
    check_durations(durations, n_parts)
    done: list[list[TimedOperation]] = [[] for _ in range(plan.stages)]
    ends: dict[tuple[int, Operation], float] = {}
    progressed = True
    while progressed:
        progressed = False
        for stage, order in enumerate(plan.orders):
            while len(done[stage]) < len(order):
                operation = order[len(done[stage])]
                inputs = plan.inputs(stage, operation)
                if any(needed not in ends for needed in inputs):
                    break
                free = done[stage][-1].end if done[stage] else 0.0
                start = max([free, *(ends[needed] for needed in inputs)])
                times = durations[plan.part(stage, operation.chunk)]
                end = start + sum(times[part] for part in operation.kind)
                done[stage].append(TimedOperation(stage, operation, start, end))
                ends[stage, operation.result] = end
                progressed = True
    if waiting := [
        order[len(ended)] for ended, order in zip(done, plan.orders, strict=True) if len(ended) < len(order)
    ]:
        raise RuntimeError(f"{plan.name} deadlocks: stages wait, next are {waiting}")
    return Timeline(plan, tuple(map(tuple, done)))
