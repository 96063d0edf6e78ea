"""The idle time of a pipeline schedule (its bubble), if all stages take as long as the slowest.

Schedules are simulated (``pipeline.py``) for few micro-batches, and extrapolated: groups of as many micro-batches as
there are stages are added until another group adds as many seconds as the one before.

    span_seconds("zb-h1", 4, 512, 1, durations)
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from math import isclose

from cs336_systems.costs.parallelism import pipeline
from cs336_systems.costs.parallelism.schedules import make_schedule

SIMULATED = 3
"""Groups of micro-batches (one per stage) in the first simulation."""


@cache
def simulates(schedule: str, n_stages: int, n_micro_batches: int, chunks: int) -> bool:
    """Whether a schedule exists for these numbers of stages, micro-batches and chunks of layers."""
    try:  # two groups of micro-batches and the remainder decide this
        make_schedule(schedule, n_stages, min(n_micro_batches, 2 * n_stages + n_micro_batches % n_stages), chunks)
    except ValueError:
        return False
    return True


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

    def run(few: int) -> float:
        return _simulated(schedule, n_stages, few, chunks, *scaled)

    groups = SIMULATED
    while (more := -(-n_micro_batches // max(1, n_stages)) - groups) > 0:
        few = n_micro_batches - more * n_stages
        with suppress(ValueError):  # a schedule may need more micro-batches
            ran = [run(few - i * n_stages) for i in range(3)]
            step, earlier = (ran[i] - ran[i + 1] for i in (0, 1))
            if isclose(step, earlier, rel_tol=1e-9, abs_tol=1e-9):
                return unit * (ran[0] + more * step)
        groups *= 2
    return unit * run(n_micro_batches)


def least_bubble(schedule: str, n_stages: int, chunks: int, durations: Mapping[str, float]) -> float:
    """A lower bound of a stage's idle seconds, from the table in ``schedules.py``; 0 for a schedule without a bound."""
    forward, inputs, weights = (durations[kind] for kind in "FBW")
    late = {"gpipe": forward + inputs + weights, "zb-h1": forward + inputs - weights}
    late |= {"1f1b": late["gpipe"], "interleaved": late["gpipe"] / chunks}
    return max(0.0, (n_stages - 1) * late.get(schedule, 0.0))


@cache
def _simulated(
    schedule: str, n_stages: int, few: int, chunks: int, forward: float, inputs: float, weights: float
) -> float:
    """The span of a simulated schedule."""
    durations = {"F": forward, "B": inputs, "W": weights}
    return pipeline.simulate(schedule, n_stages, few, chunks=chunks, durations=durations).span
