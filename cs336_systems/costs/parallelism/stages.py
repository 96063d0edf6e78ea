"""Divides a model's blocks over the parts of a pipeline, so that all stages take about equally long.

The embedding is in the first part, the head in the last. The head with its loss takes as long as several blocks (two in
Llama 3 8B), so the stage that has it gets fewer blocks. Seconds are predicted for an H100 by ``costs/streaming.py``;
only their ratios matter, which differ little between GPUs.

    plan = plan_of(case)                               # None without a pipeline
    blocks = divide(plan, case.config)                 # slices of the model's blocks, by part
    stages_of(config, 8192, 4, "zbv")                  # the stages of the same division, for a search
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from cs336_systems.case import TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.costs.fsdp import Shape, model_units
from cs336_systems.costs.parallelism.schedules import Schedule, make_schedule, places_of
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import LEVELS, StreamedWork
from cs336_systems.hardware import hardware_named

_KINDS = ("forward", "recompute", "backward", "embed", "embed backward", "head")


@dataclass(frozen=True)
class Stage:
    """The part of a model that one rank of a pipeline holds."""

    n_layers: int
    embedding: bool
    head: bool

    def units(self, part: ModelConfig) -> list[list[Shape]]:
        """Shapes of this stage's parameters by FSDP unit (``costs/fsdp.py``); ``part`` is a tensor rank's model.

        A head that is tied to the embedding is a unit only on a stage without the embedding.
        """
        embedding, *blocks = model_units(part)
        blocks, ends = blocks[: part.n_layers][:1] * self.n_layers, blocks[part.n_layers :]
        tied_away = [embedding] if part.tie_embeddings and not self.embedding else []
        return [*([embedding] if self.embedding else []), *blocks, *([*ends, *tied_away] if self.head else [])]

    def n_parameters(self, part: ModelConfig) -> int:
        """The number of this stage's parameters; ``part`` is a tensor rank's model."""
        words = part.vocab_size * part.d_model
        tied = part.tie_embeddings and self.embedding and self.head
        ends = (self.embedding + self.head - tied) * words + self.head * part.d_model
        return self.n_layers * part.n_block_parameters + ends


def plan_of(case: TrainingCase) -> Schedule | None:
    """The schedule of a case's pipeline, if it has one; raises ValueError if it is impossible."""
    how = case.parallel
    if how.pipeline == 1:
        return None
    asked = how.pipeline_schedule, how.pipeline, case.accumulate, how.pipeline_chunks
    counts = [own.stop - own.start for own in divide(make_schedule(*asked), case.config)]
    return make_schedule(*asked, durations=part_seconds(case.config, counts, case.keep))


def divide(plan: Schedule, config: ModelConfig) -> tuple[slice, ...]:
    """The slice of block numbers of each part, from input to output.

    Raises:
        ValueError: there are fewer blocks than parts.
    """
    if config.n_layers < (n_parts := len(plan.places)):
        how = f"{plan.chunks} on each of {plan.stages} stages of {plan.name}"
        raise ValueError(f"{config.n_layers} blocks do not make {n_parts} parts of a pipeline, {how}")
    counts = blocks_of_parts(plan.name, plan.stages, plan.chunks, config)
    starts = [sum(counts[:part]) for part in range(len(counts))]
    return tuple(slice(start, start + count) for start, count in zip(starts, counts, strict=True))


@cache
def stages_of(
    config: ModelConfig, length: int, n_stages: int, schedule: str = "1f1b", chunks: int = 1
) -> tuple[Stage, ...]:
    """The stages of a pipeline on sequences of ``length`` tokens, with blocks divided as by ``divide``.

    If there are one or two fewer blocks than parts, the head, or head and embedding, are parts without blocks, as in
    Megatron.

    Raises:
        ValueError: there are fewer blocks.
    """
    if n_stages == 1:
        return (Stage(config.n_layers, True, True),)
    n_layers, places = [0] * n_stages, places_of(schedule, n_stages, chunks)
    counts = blocks_of_parts(schedule, n_stages, chunks, config.at_context(length))
    for (stage, _), count in zip(places, counts, strict=True):
        n_layers[stage] += count
    first, last = (places[part][0] for part in (0, -1))
    return tuple(Stage(own, stage == first, stage == last) for stage, own in enumerate(n_layers))


@cache
def blocks_of_parts(schedule: str, n_stages: int, chunks: int, config: ModelConfig) -> tuple[int, ...]:
    """The number of blocks of each part, from input to output; raises ValueError if there are too few."""
    places = places_of(schedule, n_stages, chunks)
    counts, missing = [1] * len(places), max(0, len(places) - config.n_layers)
    if missing > 2:
        raise ValueError(f"{config.n_layers} blocks are too few for {len(places)} parts of a pipeline of {schedule}")
    for part in (-1, 0)[:missing]:
        counts[part] = 0
    loads, of_stages = [float(count) for count in counts], [0.0] * n_stages
    for part, end in zip((0, -1), end_blocks(config), strict=True):
        loads[part] += end
    for (stage, _), load in zip(places, loads, strict=True):
        of_stages[stage] += load
    late = 1 if schedule == "zbv" else -1
    for _ in range(config.n_layers - len(places)):
        # The least loaded part of the least loaded stage. Ties go to later parts, which wait for the others; under ZBV
        # to earlier ones (Llama 3 8B on four stages with 8 micro-batches: 9.9 instead of 11.9 % idle, simulated).
        part = min(range(len(places)), key=lambda part: (of_stages[places[part][0]], loads[part], late * part))
        counts[part] += 1
        loads[part] += 1
        of_stages[places[part][0]] += 1
    return tuple(counts)


def stages_of_case(case: TrainingCase) -> tuple[Stage, ...]:
    """The stages of a case's pipeline; a single stage if it has none."""
    how, length = case.parallel, case.config.context_length
    return stages_of(case.config, length, how.pipeline, how.pipeline_schedule, how.pipeline_chunks)


def end_blocks(config: ModelConfig) -> tuple[float, float]:
    """Forward and backward time of (the embedding, the head with its loss), relative to that of a block."""
    seconds = _seconds(config, LEVELS[0])
    block = seconds["forward"] + seconds["backward"]
    return (seconds["embed"] + seconds["embed backward"]) / block, seconds["head"] / block


def part_seconds(config: ModelConfig, counts: Sequence[int], keep: str) -> list[dict[str, float]]:
    """Seconds of F, B and W of one sequence on each part of the model.

    The head's gradients are computed with its loss, in F; those of the embedding in B.

    Args:
        counts: the number of blocks of each part.
        keep: the level of the blocks; only the last block's level counts, without its switches.
    """
    level = keep.split("+")[-1].split("-")[0]
    seconds = _seconds(config, level if level in LEVELS else LEVELS[-1])
    products = seconds["weights"]
    whole = seconds["backward"] + seconds["recompute"]
    block = {"F": seconds["forward"], "B": whole - products, "W": products}
    found = [{kind: count * time for kind, time in block.items()} for count in counts]
    found[0]["F"] += seconds["embed"]
    found[0]["B"] += seconds["embed backward"]
    found[-1]["F"] += seconds["head"]
    return found


@cache
def _seconds(config: ModelConfig, level: str) -> dict[str, float]:
    rates, length = Rates.of(hardware_named("h100")), config.context_length
    work = StreamedWork(config, length, length)
    found = {kind: work.seconds(kind, 0, level, rates) for kind in _KINDS}
    return found | {"weights": 2 * length * config.n_block_parameters / rates.products}
