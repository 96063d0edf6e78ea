"""Pipeline schedules as data: for each stage, the list of its operations in order.

A model divided into p stages runs m micro-batches. A stage runs one operation at a time, in the order of its list. F
(forward) needs F of the preceding part; B (input gradient) needs B of the following part and its own F; W (weight
gradient) needs its own B, and only the optimizer waits for W. BW is B and W in one operation. A stage may hold several
parts of the model ("chunks"): chunk c of stage s is part c p + s. Under the V-shaped schedules, the second chunk is
part 2p - 1 - s, so the first stage holds both ends of the model.

    schedule      order                                                        bubble per stage       activations alive
    gpipe         all F, then all BW                                           (p-1)(F + B + W)       m
    1f1b          p - s - 1 forwards ahead at stage s, then one backward each  (p-1)(F + B + W)       p - s
    interleaved   1f1b over v thin stages on each device                       (p-1)(F + B + W) / v   more than 1f1b
    zb-h1         1f1b with W delayed by s micro-batches at stage s            (p-1)(F + B - W)       p
    zbv           V-shaped; the fastest of several greedy lists (``zbv.py``)   less than zb-h1        p
    dualpipev     V-shaped; F of one chunk and BW of the other in turn         less than zb-h1        p + 1/2

(Interleaved keeps min(m, (2(p-s-1) + (v-1)p + 1) / v) at stage s. The zero-bubble rows hold if W is no longer than F
and B.)

    plan = make_schedule("zbv", stages=4, microbatches=8)
    plan.orders[0]                                     # the first stage's operations
    plan.channel(0, 1)                                 # those whose results it sends to the second stage, in order

The same lists are simulated (``pipeline.py``) and executed (``distributed/pipeline.py``). Sources: Huang et al. 2019
(GPipe); Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2023, "Zero bubble pipeline parallelism",
section 2 (ZB-H1); Qi et al. 2024, "Pipeline parallelism with controllable memory" (V-shaped placement, ZBV); DeepSeek
2024 and Sea AI Lab 2025 (DualPipeV: the V-shaped half of DualPipe).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from cs336_systems.config import check_known
from cs336_systems.costs.parallelism.zbv import best_orders
from cs336_systems.ranks import SCHEDULES

Kind = Literal["F", "B", "W", "BW"]
"""Forward, input gradient, weight gradient, or the last two in one operation."""

VEE = ("zbv", "dualpipev")
"""Schedules whose second chunks are assigned to stages in reverse order."""

UNIT: Mapping[str, float] = {"F": 1.0, "B": 1.0, "W": 1.0}
"""Equal durations of F, B and W of one micro-batch on a whole stage, in units of a forward."""


@dataclass(frozen=True, order=True)
class Operation:
    """The work of one stage on one micro-batch and one of its chunks of layers."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    @property
    def result(self) -> "Operation":
        """The operation under which others wait for it: B also for BW, as both give the input gradient."""
        return Operation("B", self.microbatch, self.chunk) if self.kind == "BW" else self


@dataclass(frozen=True)
class Schedule:
    """The orders of all stages."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    orders: tuple[tuple[Operation, ...], ...]
    """For each stage, its operations in order."""

    def part(self, stage: int, chunk: int) -> int:
        """The number of a stage's chunk among the parts of the model, from input to output."""
        return _part(self.name, self.stages, stage, chunk)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(stage, chunk) of each part of the model."""
        return places_of(self.name, self.stages, self.chunks)

    def forwards(self, microbatches: int) -> "Schedule":
        """The same orders reduced to the forwards of the first ``microbatches`` micro-batches."""
        kept = (tuple(op for op in order if op.kind == "F" and op.microbatch < microbatches) for order in self.orders)
        return replace(self, microbatches=microbatches, orders=tuple(kept))

    def inputs(self, stage: int, operation: Operation) -> list[tuple[int, Operation]]:
        """(stage, result) of each operation that must end before this one can begin."""
        kind, i, part = operation.result.kind, operation.microbatch, self.part(stage, operation.chunk)
        if kind == "W":
            return [(stage, Operation("B", i, operation.chunk))]
        needed = [] if kind == "F" else [(stage, Operation("F", i, operation.chunk))]
        source = part - 1 if kind == "F" else part + 1
        if 0 <= source < len(self.places):
            of_stage, chunk = self.places[source]
            needed.append((of_stage, Operation(kind, i, chunk)))
        return needed

    def receiver(self, stage: int, operation: Operation) -> tuple[int, Operation] | None:
        """(stage, result) of the operation that needs this one's result; None at the ends of the model, and for W."""
        target = self.part(stage, operation.chunk) + (1 if operation.kind == "F" else -1)
        if operation.kind == "W" or not 0 <= target < len(self.places):
            return None
        of_stage, chunk = self.places[target]
        return of_stage, Operation(operation.result.kind, operation.microbatch, chunk)

    def channel(self, source: int, target: int) -> tuple[Operation, ...]:
        """The operations of ``source`` whose results ``target`` needs, in the order in which they are sent."""
        found = ((op, self.receiver(source, op)) for op in self.orders[source])
        return tuple(op for op, to in found if source != target and to is not None and to[0] == target)

    def messages(self, stage: int) -> list[tuple[int, int]]:
        """(source, target) of each message that a stage sends or receives by copies, in that order.

        An operation's input is received right before it, after all earlier messages of the stage that sends it.
        """
        coming = {source: [op.result for op in self.channel(source, stage)] for source in range(self.stages)}
        found: list[tuple[int, int]] = []
        for operation in self.orders[stage]:
            if operation.kind == "W":
                continue
            for source, result in self.inputs(stage, operation):
                while result in coming[source]:
                    coming[source].pop(0)
                    found.append((source, stage))
            to = self.receiver(stage, operation)
            if to is not None and to[0] != stage:
                found.append((stage, to[0]))
        return found

    @cached_property
    def messages_ahead(self) -> int:
        """How many messages from one stage to another a mailbox must hold to avoid deadlock.

        Each stage is assumed to run all its operations, sends and receives included, in one order. The result is at
        least two, so that one message can arrive while another is read.
        """
        left = [self.messages(stage)[::-1] for stage in range(self.stages)]
        room, waiting = 2, Counter[tuple[int, int]]()
        while any(left):
            moved = False
            for stage, own in enumerate(left):
                while own:
                    sends = own[-1][0] == stage
                    if waiting[own[-1]] == (room if sends else 0):
                        break
                    waiting[own.pop()] += 1 if sends else -1
                    moved = True
            if not moved:
                room += 1
                assert room <= len(self.orders[0]), "the lists can never end"
        return room

    def arrived(self, stage: int) -> dict[Operation, list[Operation]]:
        """For operations of a stage, earlier ones whose results another stage has used before they begin.

        A stage knows this once it has a result that the other stage computed later. Not every result appears.
        """
        places = [{op.result: i for i, op in enumerate(order)} for order in self.orders]
        heard, sent = [-1] * self.stages, list[tuple[Operation, int, int]]()
        found: dict[Operation, list[Operation]] = {}
        for operation in self.orders[stage]:
            for source, result in self.inputs(stage, operation):
                heard[source] = max(heard[source], places[source][result]) if source != stage else -1
            known = [each for each in sent if each[2] <= heard[each[1]]]
            sent = [each for each in sent if each not in known]
            found[operation] = [each for each, _, _ in known]
            to = self.receiver(stage, operation)
            if to is not None and to[0] != stage:
                sent.append((operation, to[0], places[to[0]][to[1]]))
        return found


def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    durations: Mapping[str, float] | Sequence[Mapping[str, float]] = UNIT,
) -> Schedule:
    """The lists of a schedule.

    Args:
        chunks: v of ``interleaved``, at least 2; ignored by the others (the V-shaped schedules have 2, the rest 1).
        durations: of F, B and W, the same for all parts of the model or for each part; they determine ``zbv``'s lists.

    Raises:
        ValueError: no such schedule; no stages or micro-batches; fewer than two chunks for ``interleaved``; a number
            of micro-batches that the schedule does not support (``interleaved`` needs a multiple of the stages,
            ``dualpipev`` at least twice as many as stages); durations are not positive, or not one for each part.
    """
    check_known("schedule", name, SCHEDULES)
    if stages < 1 or microbatches < 1:
        raise ValueError(f"stages and micro-batches must be positive, got {stages} and {microbatches}")
    if name == "interleaved" and chunks < 2:
        raise ValueError(f"interleaved needs two or more chunks of blocks on each stage, got {chunks}")
    if name == "interleaved" and microbatches % stages:
        asked = f"{microbatches} micro-batches over {stages} stages"
        raise ValueError(f"interleaved needs a multiple of the stages as micro-batches, got {asked}")
    if name == "dualpipev" and microbatches < 2 * stages:
        raise ValueError(f"dualpipev needs {2 * stages} micro-batches for {stages} stages, got {microbatches}")
    chunks = _chunks(name, chunks)
    if isinstance(durations, Mapping):
        durations = [durations] * (stages * chunks)
    check_durations(durations, stages * chunks)
    if name == "zbv":
        orders = [[Operation(*item) for item in order] for order in best_orders(stages, microbatches, durations)]
    else:
        by_stage: Callable[..., list[Operation]] = _dual_pipe if name == "dualpipev" else _one_direction
        orders = [by_stage(name, stage, stages, microbatches, chunks) for stage in range(stages)]
    return Schedule(name, stages, microbatches, chunks, tuple(map(tuple, orders)))


@cache
def places_of(name: str, stages: int, chunks: int = 1) -> tuple[tuple[int, int], ...]:
    """(stage, chunk) of each part of the model under a schedule of ``make_schedule``."""
    found = {_part(name, stages, s, c): (s, c) for s in range(stages) for c in range(_chunks(name, chunks))}
    return tuple(found[part] for part in range(len(found)))


def _chunks(name: str, chunks: int) -> int:
    return chunks if name == "interleaved" else 2 if name in VEE else 1


def check_durations(durations: Sequence[Mapping[str, float]], n_parts: int) -> None:
    """Raise ValueError unless there are durations for ``n_parts`` parts, all of them positive."""
    if len(durations) != n_parts:
        raise ValueError(f"durations of {n_parts} parts are needed, got {len(durations)}")
    if min(time for each in durations for time in each.values()) <= 0:
        raise ValueError(f"durations must be positive, got {[dict(each) for each in durations]}")


def _part(name: str, stages: int, stage: int, chunk: int) -> int:
    return chunk * stages + (stages - 1 - stage if name in VEE and chunk % 2 else stage)


def _one_direction(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> list[Operation]:
    """A stage's list: some forwards, then forwards and backwards alternately, then the remaining backwards."""
    order = [(i, 0) for i in range(microbatches)]
    ahead = microbatches if name == "gpipe" else stages - stage - 1
    if name == "interleaved":  # groups of p micro-batches pass all chunks before the next group begins
        groups = range(0, microbatches, stages)
        order = [(group + i, chunk) for group in groups for chunk in range(chunks) for i in range(stages)]
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(order))
    forwards = [Operation("F", i, chunk) for i, chunk in order]
    whole: Kind = "B" if name == "zb-h1" else "BW"
    backwards = [Operation(whole, i, chunks - 1 - chunk) for i, chunk in order]
    ordered = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        ordered += [forward, backward]
    ordered += backwards[len(forwards) - ahead :]
    return _with_weights_put_off(ordered, stage) if name == "zb-h1" else ordered


def _with_weights_put_off(ordered: list[Operation], stage: int) -> list[Operation]:
    """A list in which W of micro-batch i runs after B of micro-batch i + s, and the remaining W at the end."""
    with_weights: list[Operation] = []
    waiting: list[Operation] = []
    for operation in ordered:
        with_weights.append(operation)
        if operation.kind == "B":
            waiting.append(Operation("W", operation.microbatch))
            if len(waiting) > stage:
                with_weights.append(waiting.pop(0))
    return with_weights + waiting


def _dual_pipe(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> list[Operation]:
    """DualPipeV's list of one stage; W are delayed while the pipeline fills and while it drains."""
    order: list[Operation] = []
    done = {(kind, chunk): 0 for kind in ("F", "B") for chunk in (0, 1)}
    waiting: list[Operation] = []

    def forward(chunk: int) -> None:
        order.append(Operation("F", done["F", chunk], chunk))
        done["F", chunk] += 1

    def backward(chunk: int, *, put_off: bool = False) -> None:
        i = done["B", chunk]
        order.append(Operation("B" if put_off else "BW", i, chunk))
        if put_off:
            waiting.append(Operation("W", i, chunk))
        done["B", chunk] += 1

    def weights() -> None:
        order.append(waiting.pop(0))

    behind = stages - stage - 1
    for _ in range(2 * behind):
        forward(0)
    for _ in range(stage + 1):
        forward(0)
        forward(1)
    for _ in range(behind):
        backward(1, put_off=True)
        weights()
        forward(1)
    for _ in range(microbatches - 2 * stages + stage + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(behind):
        backward(1)
        forward(1)
        backward(0)
    for step in range(stage + 1):
        backward(1, put_off=2 * step >= stage + 1)
        backward(0, put_off=2 * step >= stage)
    for _ in range(behind):
        if waiting:
            weights()
        backward(0, put_off=True)
    while waiting:
        weights()
    return order
