"""The lists of ZBV, by list scheduling: several rules are simulated, and the one whose last stage ends first wins.

A stage that is free takes, of the operations whose inputs are there, the first in the order of a rule. Where nothing
but W can begin, it begins one, unless an input that is on its way would then wait for more than a share of it. A stage
holds at most p micro-batches in both chunks (2p halves, from F to W). One half is never given to the first chunk, so
that the oldest micro-batch can always go on. A rule also says how many halves more the first stage's first chunk leaves
free: fewer forwards ahead make later ones wait less in the middle.

No rule is best for all durations. Parts that take the same get the first rule alone: a search of layouts, which takes
all parts for alike, asks for thousands of lists. Source: Qi et al. 2024, "Pipeline parallelism with controllable
memory".

    best_orders(4, 8, durations)[0]                    # the first stage's (kind, micro-batch, chunk)
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Literal

Item = tuple[Literal["F", "B", "W"], int, int]
"""Kind, micro-batch and chunk."""
Rule = tuple[int, float, Sequence[tuple[Literal["F", "B"], int]]]
"""Halves left free on the first stage; share of a W for which an operation may wait; kinds and chunks by urgency."""

_URGENT: tuple[tuple[tuple[Literal["F", "B"], int], ...], ...] = (
    (("F", 1), ("B", 0), ("B", 1), ("F", 0)),
    (("B", 1), ("B", 0), ("F", 1), ("F", 0)),
    (("F", 1), ("F", 0), ("B", 0), ("B", 1)),
)
"""Kinds and chunks by urgency. Each is the best for some stages, micro-batches and durations of Llama 3 8B's."""
_LEFT_FREE = 3
"""How many numbers of halves that the first stage leaves free are tried, from none on."""
_FEW = 32
"""The most micro-batches for which all rules are simulated; lists of more follow the rule of these."""
_LATE = 0.25, 0.5
"""Shares of a W for which an operation may wait."""


def best_orders(stages: int, microbatches: int, durations: Sequence[Mapping[str, float]]) -> list[list[Item]]:
    """The operations of each stage, in their order.

    Args:
        durations: of F, B and W of each part, from input to output; stage s has parts s and 2 stages - 1 - s.
    """
    rules = list(product(range(min(_LEFT_FREE, stages)), _LATE, _URGENT))
    if all(part == durations[0] for part in durations):
        return _by_rule(rules[0], microbatches, durations)[1]
    few, best, chosen = min(microbatches, _FEW), math.inf, rules[0]
    for rule in rules:
        span, _ = _by_rule(rule, few, durations, best)
        if span < best * (1 - 1e-9):  # equal ones may differ by rounding
            best, chosen = span, rule
    return _by_rule(chosen, microbatches, durations)[1]


def _by_rule(
    rule: Rule, microbatches: int, durations: Sequence[Mapping[str, float]], within: float = math.inf
) -> tuple[float, list[list[Item]]]:
    """When the last operation ends, and the orders; infinity as soon as it is seen that it ends after ``within``."""
    left_free, late, urgent = rule
    n_parts = most = len(durations)
    stages = n_parts // 2
    work = [microbatches * (sum(durations[s].values()) + sum(durations[-1 - s].values())) for s in range(stages)]
    ends: dict[str, list[list[float]]] = {kind: [[] for _ in range(n_parts)] for kind in "FB"}
    orders: list[list[Item]] = [[] for _ in range(stages)]
    waiting: list[list[Item]] = [[] for _ in range(stages)]
    alive, free_at, idle = [[0, 0] for _ in range(stages)], [0.0] * stages, [0.0] * stages
    moments = [(0.0, 0)]

    def ready(kind: str, part: int, i: int) -> float:
        """When the inputs are there; infinity if they are not under way."""
        if kind == "F":
            needed = ends["F"][part - 1 : part] if part else []
        else:
            needed = [ends["F"][part], *ends["B"][part + 1 : part + 2]]
        there = 0.0
        for each in needed:
            if i >= len(each):
                return math.inf
            there = max(there, each[i])
        return there

    def room(stage: int, chunk: int) -> bool:
        first_most = most - 1 - (left_free if stage == 0 else 0)
        return sum(alive[stage]) < most - (chunk == 0) and (chunk == 1 or alive[stage][0] < first_most)

    def choose(stage: int, now: float) -> Item | None:
        following = math.inf
        for kind, chunk in urgent:
            part = n_parts - 1 - stage if chunk else stage
            i = len(ends[kind][part])
            if i == microbatches or (kind == "F" and not room(stage, chunk)):
                continue
            if (there := ready(kind, part, i)) <= now:
                return kind, i, chunk
            following = min(following, there)
        if not waiting[stage]:
            return None
        first = waiting[stage][0]
        lasts = durations[n_parts - 1 - stage if first[2] else stage]["W"]
        full = sum(alive[stage]) >= most - 1
        return first if full or now + lasts - following <= late * lasts else None

    while moments:
        now, stage = heapq.heappop(moments)
        if free_at[stage] > now or (found := choose(stage, now)) is None:
            continue
        kind, i, chunk = found
        part = n_parts - 1 - stage if chunk else stage
        idle[stage] += now - free_at[stage]
        if idle[stage] + work[stage] >= within:
            return math.inf, orders
        orders[stage].append(found)
        free_at[stage] = end = now + durations[part][kind]
        heapq.heappush(moments, (end, stage))
        if kind == "W":
            waiting[stage].pop(0)
            alive[stage][chunk] -= 1
            continue
        ends[kind][part].append(end)
        if kind == "F":
            alive[stage][chunk] += 1
        else:
            waiting[stage].append(("W", i, chunk))
        target = part + 1 if kind == "F" else part - 1
        if 0 <= target < n_parts:
            heapq.heappush(moments, (end, min(target, n_parts - 1 - target)))
    assert all(len(order) == 6 * microbatches for order in orders), (microbatches, rule)
    return max(free_at), orders
