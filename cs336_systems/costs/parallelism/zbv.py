"""The lists of ZBV, by list scheduling: several priority rules are simulated, and the one that ends first is taken.

A free stage runs, among the operations whose inputs have arrived, the one with the highest priority. If only W can
begin, it runs one, unless the next F or B, whose input is under way, would then be delayed by more than a given share
of that W. (A stage whose memory is full runs W in any case.) A stage holds at most p micro-batches in both chunks, that
is 2p halves, from F to W. One half is never given to the first chunk, so that the oldest micro-batch can always
proceed. A rule also says how many more halves the first stage leaves free in its first chunk: fewer forwards ahead make
later ones wait less in the middle.

No rule is best for all durations. If all parts take equally long, only the first rule is used, because a search over
layouts, which assumes equal parts, needs thousands of lists. Source: Qi et al. 2024, "Pipeline parallelism with
controllable memory".

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
"""Halves left free on the first stage; share of a W by which an operation may be delayed; (kind, chunk) by priority."""

_URGENT: tuple[tuple[tuple[Literal["F", "B"], int], ...], ...] = (
    (("F", 1), ("B", 0), ("B", 1), ("F", 0)),
    (("B", 1), ("B", 0), ("F", 1), ("F", 0)),
    (("F", 1), ("F", 0), ("B", 0), ("B", 1)),
)
"""(Kind, chunk) by priority. Each is best for some numbers of stages and micro-batches and durations of Llama 3 8B."""
_LEFT_FREE = 3
"""The first stage leaves 0, 1, ... halves free; so many of these values are tried."""
_FEW = 32
"""The most micro-batches for which all rules are simulated; longer lists use the rule that is best for these."""
_LATE = 0.25, 0.5
"""Shares of a W by which an operation may be delayed."""


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
        if span < best * (1 - 1e-9):  # equal spans may differ by rounding
            best, chosen = span, rule
    return _by_rule(chosen, microbatches, durations)[1]


def _by_rule(
    rule: Rule, microbatches: int, durations: Sequence[Mapping[str, float]], within: float = math.inf
) -> tuple[float, list[list[Item]]]:
    """(Time at which the last operation ends, orders); infinity as soon as that time must exceed ``within``."""
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
        """The time at which the inputs are ready; infinity if an operation that computes them has not begun."""
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
