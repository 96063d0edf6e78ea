"""The micro-batches whose tensors a pipeline stage holds while each operation of its list runs.

A stage (``training/pipelined.py``) holds the activations that blocks keep from F to the end of B, the operands of
weight gradients from B to the end of W, and weight gradients from the first W on. Its list alone decides how many of
each it holds; if an operation occurs with several such counts, only the largest matter. Lists of many micro-batches
repeat, so four times as many micro-batches as stages produce every case, except under GPipe, which holds all
micro-batches.

    plan = make_schedule("zb-h1", 4, shown("zb-h1", 4, 512))
    blocks, cases = holdings(plan, [8, 8, 9, 7])[0]    # the first stage
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cs336_systems.costs.parallelism.schedules import Kind, Operation, Schedule


class Task(NamedTuple):
    """A kind of operation, whichever the micro-batch."""

    kind: Kind
    first: bool
    """Whether it is on the stage's first chunk."""
    last: bool
    n_blocks: int
    new: bool
    """Whether the gradients of these blocks' weights do not exist yet."""


class Held(NamedTuple):
    """How many blocks' and micro-batches' tensors a stage holds when a task begins."""

    whole: int
    """(Block, micro-batch) pairs between F and the end of B."""
    late: int
    """(Block, micro-batch) pairs between B and the end of W."""
    losses: int
    """Micro-batches between F and the end of B on the last chunk."""
    gradients: int
    """Blocks whose weight gradients exist."""
    first: bool
    """Whether a B of the first chunk has run, which computes an embedding's gradient."""
    last: bool
    """Whether a B of the last chunk has run, which computes a head's gradient."""


def shown(schedule: str, n_stages: int, n_micro_batches: int) -> int:
    """The number of micro-batches with which a schedule has every case that it has with ``n_micro_batches``."""
    return n_micro_batches if schedule == "gpipe" else min(n_micro_batches, 4 * n_stages + n_micro_batches % n_stages)


def holdings(plan: Schedule, counts: Sequence[int]) -> list[tuple[tuple[int, ...], dict[Task, set[Held]]]]:
    """For each stage, the number of blocks of its chunks, and what it holds in each task.

    Args:
        counts: the number of blocks of each part of the model.
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
    """The cases that no other case dominates, that is, reaches or exceeds in every count."""
    found: list[Held] = []
    for case in sorted(cases, reverse=True):  # no later one exceeds an earlier one
        _, late, losses, gradients, first, last = case
        for _, a, b, c, d, e in found:  # their ``whole`` is no smaller, because cases are sorted
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
