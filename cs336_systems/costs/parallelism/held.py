"""The micro-batches whose tensors a stage of a pipeline holds while each operation of its list runs.

A stage (``training/pipelined.py``) holds what blocks keep from F to the end of B, what the gradients of weights read
from B to the end of W, and these gradients from the first W on. Its list alone decides how many of each it holds; of
several cases in the same operation only the fullest count. Lists of many micro-batches repeat, so that four times as
many micro-batches as stages show every case, except under GPipe, which holds all micro-batches.

    plan = make_schedule("zb-h1", 4, shown("zb-h1", 4, 512))
    blocks, cases = holdings(plan, [8, 8, 9, 7])[0]    # of the first stage
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cs336_systems.costs.parallelism.schedules import Kind, Operation, Schedule


class Task(NamedTuple):
    """An operation of any micro-batch."""

    kind: Kind
    first: bool
    """Whether it is of the stage's first chunk."""
    last: bool
    n_blocks: int
    new: bool
    """Whether the gradients of these blocks' weights are not there yet."""


class Held(NamedTuple):
    """Numbers of blocks and micro-batches whose tensors a stage holds as a task begins."""

    whole: int
    """Blocks of micro-batches from F to the end of B."""
    late: int
    """Blocks of micro-batches from B to the end of W."""
    losses: int
    """Micro-batches from F to the end of B of the last chunk."""
    gradients: int
    """Blocks whose weights' gradients are there."""
    first: bool
    """Whether there has been a B of the first chunk, which brings the gradients of an embedding."""
    last: bool
    """Whether there has been one of the last chunk, for a head's."""


def shown(schedule: str, n_stages: int, n_micro_batches: int) -> int:
    """How many micro-batches a schedule needs to show every case that one with this many has."""
    return n_micro_batches if schedule == "gpipe" else min(n_micro_batches, 4 * n_stages + n_micro_batches % n_stages)


def holdings(plan: Schedule, counts: Sequence[int]) -> list[tuple[tuple[int, ...], dict[Task, set[Held]]]]:
    """The blocks of each stage's chunks, and what it holds in its tasks.

    Args:
        counts: the blocks of each part of the model.
    """
    found = []
    for stage, order in enumerate(plan.orders):
        blocks = tuple(counts[plan.part(stage, chunk)] for chunk in range(plan.chunks))
        cases: dict[Task, set[Held]] = {}
        for task, held in _walk(order, blocks):
            cases.setdefault(task, set()).add(held)
        found.append((blocks, cases))
    return found


def fullest(cases: Iterable[Held]) -> list[Held]:
    """The cases that no other case reaches or exceeds in everything that it holds."""
    found: list[Held] = []
    for case in sorted(cases, reverse=True):  # no later one exceeds an earlier one
        _, late, losses, gradients, first, last = case
        for _, a, b, c, d, e in found:  # whose blocks held whole are no fewer, by the order
            if a >= late and b >= losses and c >= gradients and d >= first and e >= last:
                break
        else:
            found.append(case)
    return found


def _walk(order: Iterable[Operation], blocks: tuple[int, ...]) -> Iterator[tuple[Task, Held]]:
    final = len(blocks) - 1
    whole = late = losses = gradients = 0
    begun, there = [False] * len(blocks), [False] * len(blocks)
    for operation in order:
        kind, chunk = operation.kind, operation.chunk
        n, last = blocks[chunk], chunk == final
        held = Held(whole, late, losses, gradients, begun[0], begun[final])
        yield Task(kind, chunk == 0, last, n, not there[chunk]), held
        step = {"F": 1, "W": 0}.get(kind, -1)
        whole, losses = whole + step * n, losses + step * last
        late += {"B": n, "W": -n}.get(kind, 0)
        begun[chunk] |= kind in ("B", "BW")
        if kind in ("W", "BW") and not there[chunk]:
            gradients, there[chunk] = gradients + n, True
