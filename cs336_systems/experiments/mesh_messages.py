"""The bytes that a rank of a mesh sends in a step along all dimensions: tensor, context, data and pipeline.

    predicted_messages(cell, rank)                     # for a cell of benchmark_parallelism; None if unknown

They are computed, not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cs336_systems.costs.fsdp import MAXIMA_BYTES, model_units, quantized_units, step_traffic
from cs336_systems.costs.memory import WIDE
from cs336_systems.costs.parallelism.stages import divide, plan_of, stages_of_case
from cs336_systems.costs.parallelism.step import (
    SEND,
    context_sent,
    copied_from,
    pipeline_sent,
    sharded_sent,
    tensor_sent,
)
from cs336_systems.ranks import Parallel

if TYPE_CHECKING:
    from cs336_systems.experiments.mesh import MeshCell

_COUNT_BYTES = 8
"""Bytes of the number of targets, which is all-reduced over the mesh."""


def predicted_messages(cell: MeshCell, rank: int) -> float | None:
    """Return the bytes that a rank sends in a step, or None if they are not predicted.

    They are not for torch's own implementations such as FSDP2, for shards with several micro-batches or tied weights,
    and for pipelines with tensor or context ranks, replicas of shards, or shards in fp8.
    """
    if cell.parallel.by_torch:
        return None
    if cell.pipeline > 1:
        return _stage_messages(cell, rank)
    how, config, itemsize = cell.parallel, cell.config.part(cell.tensor), cell.precision.parameter_bytes
    n_rows = cell.batch_size * cell.context_length // cell.context
    place = rank // cell.tensor % cell.context
    copied = n_rows // cell.tensor * config.d_model >= copied_from(cell.device)
    by = cell.tensor_by if copied else Parallel.tensor_by
    sent = tensor_sent(config, n_rows, cell.keep, cell.tensor, itemsize, by=by, recipe=cell.recipe)
    if cell.device != "cpu":  # where copies are no messages
        del sent[SEND]
    sent += context_sent(config, n_rows, cell.keep, cell.context, itemsize, rank=place, order=cell.context_order)
    n_bytes, n_replicas, units = cell.accumulate * sent.total(), cell.world_size // cell.tensor, model_units(config)
    if n_replicas == 1:
        return n_bytes
    if how.wrapper == "fsdp2":
        return None
    counted = _COUNT_BYTES if how.ranks_per_batch * how.replicas > 1 else 0
    if how.wrapper == "fsdp":
        n_shards, copies = n_replicas // how.replicas, 1 + (how.replicas > 1)
        quantized = quantized_units(cell.recipe, config.n_layers)
        messages = step_traffic(
            units, n_shards, compute_bytes=itemsize, gradient_bytes=itemsize, quantized=quantized
        ).messages
        scattered, agreed = messages["reduce-scatter"] // n_shards, MAXIMA_BYTES * len(quantized)
        of_data = messages["all-gather"] + copies * (scattered + messages["all-reduce"] - agreed) + agreed
        return n_bytes + of_data + counted if cell.accumulate == 1 and not config.tie_embeddings else None
    return n_bytes + config.n_parameters * itemsize + sum(map(len, units)) + counted  # a byte says who has a gradient


def _stage_messages(cell: MeshCell, rank: int) -> float | None:
    """Return ``predicted_messages`` for a pipeline stage; the message with the loss counts on every stage."""
    how, config, itemsize, plan = cell.parallel, cell.config, cell.precision.parameter_bytes, plan_of(cell)
    assert plan is not None
    sharded, n_data = how.wrapper == "fsdp", cell.world_size // cell.pipeline
    if how.tensor * how.context * how.replicas > 1 or (sharded and cell.recipe.quantized):
        return None
    stage, last = rank // n_data, plan.places[-1][0]
    n_rows = cell.batch_size * cell.context_length
    n_bytes = max(WIDE, itemsize)
    if cell.device == "cpu" or how.pipeline_by != "copies":  # else they are no messages
        n_bytes += pipeline_sent(config, n_rows, plan, stage, itemsize).total()
    if n_data == 1:
        return n_bytes
    n_bytes += _COUNT_BYTES * (stage == last)
    if sharded:
        return n_bytes + sharded_sent(config, plan, divide(plan, config), stage, itemsize, n_data).total()
    held = stages_of_case(cell)[stage]
    return n_bytes + held.n_parameters(config) * itemsize + sum(map(len, held.units(config)))
