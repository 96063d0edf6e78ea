"""The time for which a schedule lets a stage stand still, for stages that all take as long as the slowest.

Schedules are simulated (``pipeline.py``) over as few micro-batches as needed until each further group of as many as
there are stages adds the same seconds.

    span_seconds("zb-h1", 4, 512, 1, durations)
"""

from collections.abc import Mapping
from functools import cache
from math import isclose

from cs336_systems.costs.parallelism import pipeline

SIMULATED = 3
"""Groups of micro-batches, each as many as there are stages, that are simulated before the rhythm is looked for."""

BLOCK = {"F": 1.0, "B": 1.3, "W": 0.8}
"""Durations of a block of Llama 3 8B on 4,096 tokens, in units of its forward."""


def simulates(schedule: str, n_stages: int, n_micro_batches: int, chunks: int) -> bool:
    """Whether a schedule runs so many chunks of layers and micro-batches."""
    try:
        alive(schedule, n_stages, n_micro_batches, chunks)
    except ValueError:
        return False
    return True


def alive(schedule: str, n_stages: int, n_micro_batches: int, chunks: int, put_off: float = 1.0) -> tuple[float, ...]:
    """For each stage, the most micro-batches whose activations it keeps at once.

    Args:
        put_off: as in ``Timeline.peaks``.

    Raises:
        ValueError: as ``pipeline.simulate``.
    """
    return _in_rhythm(schedule, n_stages, n_micro_batches, chunks, *BLOCK.values(), put_off=put_off)[1:]


def span_seconds(
    schedule: str, n_stages: int, n_micro_batches: int, chunks: int, durations: Mapping[str, float]
) -> float:
    """The seconds from the first operation on any stage to the last.

    Args:
        durations: seconds of F, B and W of one micro-batch on a whole stage.

    Raises:
        ValueError: as ``pipeline.simulate``.
    """
    unit = durations["F"]
    scaled = [durations[kind] / unit for kind in "FBW"]
    return unit * _in_rhythm(schedule, n_stages, n_micro_batches, chunks, *scaled)[0]


def least_bubble(schedule: str, n_stages: int, chunks: int, durations: Mapping[str, float]) -> float:
    """Seconds that a stage stands still at least, by ``schedules.py``'s table; 0 for a schedule that is not in it."""
    forward, inputs, weights = (durations[kind] for kind in "FBW")
    late = {"gpipe": forward + inputs + weights, "zb-h1": forward + inputs - weights}
    late |= {"1f1b": late["gpipe"], "interleaved": late["gpipe"] / chunks}
    return max(0.0, (n_stages - 1) * late.get(schedule, 0.0))


def _in_rhythm(
    schedule: str,
    n_stages: int,
    n_micro_batches: int,
    chunks: int,
    forward: float,
    inputs: float,
    weights: float,
    *,
    put_off: float = 1.0,
) -> tuple[float, ...]:
    """Span and activations alive by stage, of so few micro-batches that the last two groups added the same."""

    def run(few: int) -> list[float] | None:
        found = _simulated(schedule, n_stages, few, chunks, forward, inputs, weights)
        if found is None:
            return None
        span, n_chunks, held = found
        return [span, *(max(whole + put_off * late for late, whole in each) / n_chunks for each in held)]

    groups = SIMULATED
    while (more := -(-n_micro_batches // max(1, n_stages)) - groups) > 0:
        few = n_micro_batches - more * n_stages
        ran = [each for each in (run(few - i * n_stages) for i in range(3)) if each is not None]
        if len(ran) == 3:
            steps, earlier = ([b - a for a, b in zip(ran[i + 1], ran[i], strict=True)] for i in (0, 1))
            if all(isclose(*each, rel_tol=1e-9, abs_tol=1e-9) for each in zip(steps, earlier, strict=True)):
                return tuple(last + more * step for last, step in zip(ran[0], steps, strict=True))
        groups *= 2
    whole = run(n_micro_batches)
    if whole is None:
        pipeline.simulate(schedule, n_stages, n_micro_batches, chunks=chunks)  # which says why not
        raise AssertionError(schedule)
    return tuple(whole)


@cache  # whatever a micro-batch counts for between B and W: lists of zbv take a second each
def _simulated(
    schedule: str, n_stages: int, few: int, chunks: int, forward: float, inputs: float, weights: float
) -> tuple[float, int, list[list[tuple[int, int]]]] | None:
    """Span and chunks of a simulated schedule, and by stage the most that is held before B for each number held after.

    None if it does not run so.
    """
    durations = {"F": forward, "B": inputs, "W": weights}
    try:
        timeline = pipeline.simulate(schedule, n_stages, few, chunks=chunks, durations=durations)
    except ValueError:
        return None
    held: list[dict[int, int]] = [{} for _ in range(n_stages)]
    for stage, most in enumerate(held):
        for _, whole, late in timeline.held(stage):
            most[late] = max(most.get(late, 0), whole)
    return timeline.span, timeline.plan.chunks, [list(most.items()) for most in held]
