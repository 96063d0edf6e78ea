"""Pipeline schedules as lists of operations, and the bubble that a simulation of them leaves.

A model cut into p stages runs m microbatches. A stage does one operation at a time, in the order of its list, as soon
as the stage is free and the inputs are there: F (forward) needs the F of the stage before, B (gradient of the input)
the B of the stage after and its own F, W (gradient of the weights) its own B; nothing waits for W but the optimizer.
The durations are those of a microbatch on a whole stage; sending takes no time.

    schedule      order                                                        bubble per stage       activations alive
    gpipe         all F, then all B with W                                     (p-1)(F + B + W)       m
    1f1b          p - s forwards ahead at stage s, then one backward each      (p-1)(F + B + W)       p - s
    interleaved   1f1b over v thin stages ("chunks") on each device            (p-1)(F + B + W) / v   more than 1f1b
    zb-h1         1f1b with W put off, by s microbatches at stage s            (p-1)(F + B - W)       p

(Interleaved at stage s: min(m, (2(p-s-1) + (v-1)p + 1) / v). Zero-bubble as far as W is no longer than F and B.)

Bubble is idle time per stage from the first operation on any stage to the last; its fraction is of that whole time,
where the papers divide by the work ("bubble / ideal"). GPipe and 1F1B have the same bubble: 1F1B buys memory,
interleaving buys bubble with sends (v times as many), zero-bubble with memory of what W needs. More microbatches shrink
every bubble as 1/m.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021, "Efficient large-scale language model training on GPU
clusters using Megatron-LM", section 2.2 (1F1B, interleaved); Qi et al. 2023, "Zero bubble pipeline parallelism",
section 2 (ZB-H1).
Limits: all stages alike (no embedding, no head); activations are counted in microbatches of a whole stage and live
until W.

    timeline = simulate("zb-h1", stages=4, microbatches=8)
    timeline.bubble_fraction, timeline.peak_activations
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "W", "BW"]
"""Forward, input gradient, weight gradient, or the last two in one piece."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


UNIT: Mapping[str, float] = {"F": 1.0, "B": 1.0, "W": 1.0}
"""Durations of one microbatch's operations on one whole stage: all alike, in units of a forward."""


@dataclass(frozen=True, order=True)
class Operation:
    """The work of one device on one microbatch and one of its chunks of layers."""

    kind: Kind
    microbatch: int
    chunk: int = 0
    """Number of the device's chunk: chunk c of stage s is the (c p + s)-th part of the model."""


@dataclass(frozen=True)
class TimedOperation:
    """An operation with the stage it ran on, from ``start`` to ``end``."""

    stage: int
    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule."""

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    durations: Mapping[str, float]
    operations: tuple[tuple[TimedOperation, ...], ...]
    """For each stage, in order of time."""

    @property
    def span(self) -> float:
        """Time from the first operation to the last on any stage."""
        return max(timed.end for stage in self.operations for timed in stage)

    @property
    def busy(self) -> float:
        """Work of one stage: the same on all."""
        return self.microbatches * sum(self.durations.values())

    @property
    def bubble(self) -> float:
        """Idle time of each stage between the first operation on any stage and the last."""
        return self.span - self.busy

    @property
    def bubble_fraction(self) -> float:
        """Bubble over the time that a step takes, bubble included."""
        return self.bubble / self.span

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each stage, the most microbatches whose activations are alive at once, in units of a whole stage."""
        return tuple(max(alive for _, alive in self.activations(stage)) for stage in range(self.stages))

    def activations(self, stage: int) -> list[tuple[float, float]]:
        """(time, microbatches alive) after each change on a stage: from the start of F to the end of W."""
        changes: list[tuple[float, int]] = []
        for timed in self.operations[stage]:
            if timed.operation.kind == "F":
                changes.append((timed.start, 1))
            elif "W" in timed.operation.kind:
                changes.append((timed.end, -1))
        alive, found = 0, []
        for time, change in sorted(changes):
            alive += change
            found.append((time, alive / self.chunks))
        return found


def _order(schedule: str, stage: int, stages: int, microbatches: int, chunks: int) -> list[Operation]:
    """So many forwards ahead, then forward and backward in turn, then the backwards that are left."""
    order = [(i, 0) for i in range(microbatches)]
    ahead = microbatches if schedule == "gpipe" else stages - stage - 1
    if schedule == "interleaved":  # groups of p microbatches go through all chunks before the next group begins
        groups = range(0, microbatches, stages)
        order = [(group + i, chunk) for group in groups for chunk in range(chunks) for i in range(stages)]
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(order))
    forwards = [Operation("F", i, chunk) for i, chunk in order]
    whole: Kind = "B" if schedule == "zb-h1" else "BW"
    backwards = [Operation(whole, i, chunks - 1 - chunk) for i, chunk in order]
    ordered = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        ordered += [forward, backward]
    ordered += backwards[len(forwards) - ahead :]
    return _with_weights_put_off(ordered, stage) if schedule == "zb-h1" else ordered


def _with_weights_put_off(ordered: list[Operation], stage: int) -> list[Operation]:
    """The W of microbatch i runs after the B of microbatch i + s, and what is left over at the end."""
    with_weights: list[Operation] = []
    waiting: list[Operation] = []
    for operation in ordered:
        with_weights.append(operation)
        if operation.kind == "B":
            waiting.append(Operation("W", operation.microbatch))
            if len(waiting) > stage:
                with_weights.append(waiting.pop(0))
    return with_weights + waiting


def inputs_of(stage: int, operation: Operation, stages: int, chunks: int) -> list[tuple[int, Operation]]:
    """(stage, operation) of everything that must have ended before ``operation`` can begin on ``stage``."""
    kind, i, chunk = operation.kind, operation.microbatch, operation.chunk
    if kind == "W":
        return [(stage, Operation("B", i, chunk))]
    if kind == "F":
        if stage > 0:
            return [(stage - 1, operation)]
        return [(stages - 1, Operation("F", i, chunk - 1))] if chunk > 0 else []
    own = (stage, Operation("F", i, chunk))
    if stage < stages - 1:
        return [own, (stage + 1, operation)]
    return [own, (0, Operation(kind, i, chunk + 1))] if chunk < chunks - 1 else [own]


def simulate(
    schedule: str, stages: int, microbatches: int, *, chunks: int = 1, durations: Mapping[str, float] = UNIT
) -> Timeline:
    """Run every stage's list, each operation as early as its stage and its inputs allow.

    Args:
        chunks: v, the chunks of layers per device; more than one only for ``interleaved``, which needs at least two.

    Raises:
        ValueError: no such schedule; no stages or microbatches; chunks that do not suit the schedule; or an interleaved
            schedule whose number of microbatches is no multiple of the stages.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: known are {', '.join(SCHEDULES)}")
    if stages < 1 or microbatches < 1:
        raise ValueError(f"stages and microbatches must be positive, got {stages} and {microbatches}")
    if (chunks > 1) != (schedule == "interleaved") or chunks < 1:
        raise ValueError(
            f"{schedule} runs {'2 or more chunks' if schedule == 'interleaved' else '1 chunk'}, got {chunks}"
        )
    if schedule == "interleaved" and microbatches % stages:
        raise ValueError(f"interleaved needs a multiple of {stages} microbatches, got {microbatches}")
    if min(durations.values()) <= 0:
        raise ValueError(f"durations must be positive, got {dict(durations)}")
    waiting = [_order(schedule, stage, stages, microbatches, chunks) for stage in range(stages)]
    timed: list[list[TimedOperation]] = [[] for _ in range(stages)]
    ends: dict[tuple[int, Operation], float] = {}
    while any(waiting):
        progressed = False
        for stage, queue in enumerate(waiting):
            while queue:
                inputs = inputs_of(stage, queue[0], stages, chunks)
                if any(needed not in ends for needed in inputs):
                    break
                operation = queue.pop(0)
                free = timed[stage][-1].end if timed[stage] else 0.0
                start = max([free, *(ends[needed] for needed in inputs)])
                end = start + sum(durations[part] for part in operation.kind) / chunks
                timed[stage].append(TimedOperation(stage, operation, start, end))
                ends[stage, operation] = end
                progressed = True
        assert progressed, f"{schedule} deadlocks: every stage waits, next are {[queue[:1] for queue in waiting]}"
    return Timeline(schedule, stages, microbatches, chunks, durations, tuple(tuple(stage) for stage in timed))
