"""Division of a model's blocks over the parts of a pipeline, so that all stages take about as long.

Embedding and head lie at the ends. The head with its loss takes as long as several blocks (two of Llama 3 8B), so the
stage that has it gets as many fewer. Seconds are those of one H100 by ``costs/streaming.py``; only their ratios count,
which differ little between GPUs.

    plan = plan_of(case)                               # None without a pipeline
    blocks = divide(plan, case.config)                 # slices of the model's blocks, by part
"""

from collections.abc import Sequence
from functools import cache

from cs336_systems.case import TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.costs.parallelism.schedules import Schedule, make_schedule
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import LEVELS, StreamedWork
from cs336_systems.hardware import hardware_named

_KINDS = ("forward", "recompute", "backward", "embed", "embed backward", "head")


def plan_of(case: TrainingCase) -> Schedule | None:
    """The schedule of a case's pipeline, if it has one; raises ValueError if it is impossible."""
    how = case.parallel
    if how.pipeline == 1:
        return None
    asked = how.pipeline_schedule, how.pipeline, case.accumulate, how.pipeline_chunks
    plan = make_schedule(*asked)
    level = case.keep.split("+")[-1].split("-")[0]
    durations = part_seconds(case.config, divide(plan, case.config), level if level in LEVELS else LEVELS[-1])
    return make_schedule(*asked, durations=durations)


def divide(plan: Schedule, config: ModelConfig) -> tuple[slice, ...]:
    """The blocks of each part, from input to output, by their numbers.

    Raises:
        ValueError: there are fewer blocks than parts.
    """
    if config.n_layers < (n_parts := len(plan.places)):
        how = f"{plan.chunks} on each of {plan.stages} stages of {plan.name}"
        raise ValueError(f"{config.n_layers} blocks do not make {n_parts} parts of a pipeline, {how}")
    return _divide(plan.places, plan.stages, config.at_context(config.context_length))


@cache
def _divide(places: tuple[tuple[int, int], ...], stages: int, config: ModelConfig) -> tuple[slice, ...]:
    ends = end_blocks(config)
    counts, loads = [1] * len(places), [0.0] * stages
    for part, (stage, _) in enumerate(places):
        loads[stage] += 1 + (ends[0] if part == 0 else 0) + (ends[1] if part == len(places) - 1 else 0)
    for _ in range(config.n_layers - len(places)):
        # Of the stage with least to do, the part with fewest blocks; ties go to later parts, which wait for the others.
        part = min(range(len(places)), key=lambda part: (loads[places[part][0]], counts[part], -part))
        counts[part] += 1
        loads[places[part][0]] += 1
    starts = [sum(counts[:part]) for part in range(len(places))]
    return tuple(slice(start, start + count) for start, count in zip(starts, counts, strict=True))


def stage_parameters(case: TrainingCase) -> list[int]:
    """The number of parameters of each stage of a case's pipeline, on one of its tensor ranks; of one stage without."""
    config, plan = case.config.part(case.parallel.tensor), plan_of(case)
    if plan is None:
        return [config.n_parameters]
    counts, embedding = [0] * plan.stages, config.vocab_size * config.d_model
    for (stage, _), blocks in zip(plan.places, divide(plan, case.config), strict=True):
        counts[stage] += (blocks.stop - blocks.start) * config.n_block_parameters
    first, last = (plan.places[part][0] for part in (0, -1))
    counts[first] += embedding
    counts[last] += config.d_model + (0 if config.tie_embeddings and first == last else embedding)
    return counts


def end_blocks(config: ModelConfig) -> tuple[float, float]:
    """Seconds of the embedding, and of the head with its loss, forward and backward, in those of a block."""
    seconds = _seconds(config, LEVELS[0])
    block = seconds["forward"] + seconds["backward"]
    return (seconds["embed"] + seconds["embed backward"]) / block, seconds["head"] / block


def part_seconds(config: ModelConfig, blocks: Sequence[slice], level: str) -> list[dict[str, float]]:
    """Seconds of F, B and W of one sequence on each part of the model.

    The head's gradients come with its loss, in F; those of the embedding in B.

    Args:
        blocks: of each part.
        level: what blocks keep, a name in ``costs.streaming.LEVELS``.
    """
    seconds = _seconds(config, level)
    products = seconds["weights"]
    whole = seconds["backward"] + seconds["recompute"]
    block = {"F": seconds["forward"], "B": whole - products, "W": products}
    found = [{kind: (own.stop - own.start) * time for kind, time in block.items()} for own in blocks]
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
