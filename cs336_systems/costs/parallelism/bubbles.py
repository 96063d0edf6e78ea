"""The division of a model's layers into pipeline stages, and the time that a schedule lets a stage stand still.

Embedding and head cost as much as some blocks, so the first and the last stage hold fewer of these: the least largest
stage is found. Schedules are simulated (``pipeline.py``) with the slowest stage's durations on all of them, over as few
micro-batches as needed until each further group of as many as there are stages adds the same seconds.

Limits: zbv and dualpipev have the head on the first stage; here it is on the last.

    first, middle, last = divide(n_layers=80, n_stages=4, embedding=0.0, head=1.2)
    span_seconds("zb-h1", 4, 512, 1, durations)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import floor, isclose

from cs336_systems.config import ModelConfig
from cs336_systems.costs.fsdp import Shape, model_units
from cs336_systems.costs.parallelism import pipeline

SIMULATED = 3
"""Groups of micro-batches, each as many as there are stages, that are simulated before the rhythm is looked for."""


@dataclass(frozen=True)
class Stage:
    """The part of a model that one rank of a pipeline holds."""

    n_layers: int
    embedding: bool
    head: bool

    def cost(self, embedding: float, head: float) -> float:
        """The stage's work in blocks, for the work of embedding and head in blocks."""
        return self.n_layers + self.embedding * embedding + self.head * head

    def units(self, part: ModelConfig) -> list[list[Shape]]:
        """Parameter shapes, unit by unit (``costs/fsdp.py``), of this stage of what a tensor rank holds.

        A head that is tied to the embedding is a unit of a stage that has the head alone.
        """
        embedding, *blocks = model_units(part)
        blocks, ends = blocks[: part.n_layers][:1] * self.n_layers, blocks[part.n_layers :]
        tied_away = [embedding] if part.tie_embeddings and not self.embedding else []
        return [*([embedding] if self.embedding else []), *blocks, *([*ends, *tied_away] if self.head else [])]

    def n_parameters(self, part: ModelConfig) -> int:
        """The parameters of this stage of what a tensor rank holds."""
        words = part.vocab_size * part.d_model
        tied = part.tie_embeddings and self.embedding and self.head
        ends = (self.embedding + self.head - tied) * words + self.head * part.d_model
        return self.n_layers * part.n_block_parameters + ends


@cache
def divide(n_layers: int, n_stages: int, embedding: float, head: float) -> tuple[Stage, ...]:
    """The first, a middle and the last stage, those that there are, of the division whose slowest stage is fastest.

    Every stage has a block, as in the division that runs (``stages.py``).

    Args:
        embedding, head: their work, in blocks.

    Raises:
        ValueError: there are no stages, or more stages than layers.
    """
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"{n_layers} layers cannot be divided into {n_stages} stages")
    if n_stages == 1:
        return (Stage(n_layers, True, True),)
    for work in sorted({k + end for k in range(n_layers + 1) for end in (0.0, embedding, head)}):
        first, last, middle = floor(work - embedding + 1e-9), floor(work - head + 1e-9), floor(work + 1e-9)
        if min(first, last) >= 1 and first + last + (n_stages - 2) * middle >= n_layers:
            break
    found = [Stage(first, True, False), Stage(middle, False, False), Stage(last, False, True)]
    return tuple(found if n_stages > 2 else found[::2])


def simulates(schedule: str, n_stages: int, n_micro_batches: int, chunks: int) -> bool:
    """Whether a schedule runs so many chunks of layers and micro-batches."""
    try:
        alive(schedule, n_stages, n_micro_batches, chunks)
    except ValueError:
        return False
    return True


def alive(schedule: str, n_stages: int, n_micro_batches: int, chunks: int) -> tuple[float, ...]:
    """For each stage, the most micro-batches whose activations it keeps at once.

    Raises:
        ValueError: as ``pipeline.simulate``.
    """
    return _in_rhythm(schedule, n_stages, n_micro_batches, chunks, 1.0, 1.0, 1.0)[1:]


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


def _in_rhythm(schedule: str, n_stages: int, n_micro_batches: int, chunks: int, *durations: float) -> tuple[float, ...]:
    """Span and activations alive by stage, of so few micro-batches that the last two groups added the same."""
    groups = SIMULATED
    while (more := -(-n_micro_batches // max(1, n_stages)) - groups) > 0:
        few = n_micro_batches - more * n_stages
        runs = (_simulated(schedule, n_stages, few - i * n_stages, chunks, *durations) for i in range(3))
        ran = [run for run in runs if run is not None]
        if len(ran) == 3:
            steps, earlier = ([b - a for a, b in zip(ran[i + 1], ran[i], strict=True)] for i in (0, 1))
            if all(isclose(*each, rel_tol=1e-9, abs_tol=1e-9) for each in zip(steps, earlier, strict=True)):
                return tuple(last + more * step for last, step in zip(ran[0], steps, strict=True))
        groups *= 2
    whole = _simulated(schedule, n_stages, n_micro_batches, chunks, *durations)
    if whole is None:
        pipeline.simulate(schedule, n_stages, n_micro_batches, chunks=chunks)  # which says why not
        raise AssertionError(schedule)
    return whole


@cache
def _simulated(
    schedule: str, n_stages: int, few: int, chunks: int, forward: float, inputs: float, weights: float
) -> tuple[float, ...] | None:
    """Span, and activations alive by stage, of a simulated schedule; None if it does not run so."""
    durations = {"F": forward, "B": inputs, "W": weights}
    try:
        timeline = pipeline.simulate(schedule, n_stages, few, chunks=chunks, durations=durations)
    except ValueError:
        return None
    return timeline.span, *timeline.peak_activations
