"""How ``fully_sharded.py`` measures a cell: one training step of a fully sharded model on every rank, and its losses.

The losses of several steps on one batch are compared with a reference's from the same weights: the handout's model in
plain PyTorch and IEEE fp32, under the same sharding, with 16 bytes of state per parameter. It starts from the cell's
weights, converted to fp32 exactly. These steps are not timed.
"""

import gc
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cs336_systems.case import RECIPE
from cs336_systems.costs.fsdp import model_units, quantized_units, step_traffic
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.fully_sharded import DDP, OURS, FullyShardedCell
from cs336_systems.experiments.ranked import (
    EFFORT,
    Effort,
    PreparedStep,
    check_losses,
    largest,
    peak_metrics,
    sent_metric,
    time_metrics,
)
from cs336_systems.hardware import MIB
from cs336_systems.harness.clock import WHOLE, PhaseTimes, in_gib, synchronize, time_phases_of_ranks
from cs336_systems.harness.memory import PeakMeter, check_fit, is_predictable, predicted_states
from cs336_systems.harness.provenance import sampled_state
from cs336_systems.harness.record import Metric
from cs336_systems.harness.traffic import Event, Traffic
from cs336_systems.profiling.communication import LATE_MS, breakdown_metrics, record_phases_of_ranks, timed_waits
from cs336_systems.profiling.traces import kineto
from cs336_systems.training import random_batch
from cs336_systems.training.assemble import build_model, finish

_WATCHED_STEPS = 3
"""The most steps in which waits for weights are timed; no more than the timed steps."""

_STEP = 0.004
"""Learning rate times d_model, so that one AdamW step changes a matmul's output about equally at every width. With a
higher rate, the loss after 20 steps on one batch is near zero, where relative differences mean nothing."""

_EXACT: dict[str, Any] = {
    **{name: getattr(FullyShardedCell, name) for name in ("kernels", "keep", "master", "offload", "update", *RECIPE)},
    **{"dtype": "fp32", "attention": "reference", "compile": "off", "checkpoint": "none", "optimizer": "reference"},
}


def _held_and_sent(prepared: PreparedStep) -> tuple[dict[str, int], list[Event]]:
    """Run a step; return this rank's bytes of parameters, gradients and optimizer state, and the collectives."""
    *passes, optimizer = prepared.phases().values()
    model, states = prepared.step.model, prepared.step.optimizer.state
    with Traffic() as traffic:
        for phase in passes:
            phase()
        gradients = _storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
        optimizer()
    moments = (value for state in states.values() for value in state.values() if isinstance(value, Tensor))
    held = {"parameters": _storage_bytes(model.parameters()), "gradients": gradients}
    return held | {"optimizer_state": _storage_bytes(moments)}, traffic.sent


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank, each counted once."""
    locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum({local.untyped_storage().data_ptr(): local.untyped_storage().nbytes() for local in locals_}.values())


def _gather_waits(prepared: PreparedStep) -> list[Metric]:
    """Time how long the units of this suite's FSDP wait for their weights on this rank, in separate steps.

    Each wait lengthens the step and is counted once. Without waits the step would still not be shorter by their sum: a
    gather that overlaps with kernels slows them.
    """
    assert isinstance(prepared.step.model, FSDP)
    found = []
    with timed_waits(prepared.step.model) as read_ms:
        for _ in range(min(_WATCHED_STEPS, prepared.cell.steps)):
            dist.barrier()
            for phase in prepared.phases().values():
                phase()
            found.append(read_ms())
    return [
        Metric("gathers", "per step", [len(found[-1])]),
        Metric("gather_wait", "ms per step, of the computing stream", [sum(waits) for waits in found]),
        Metric("late_gathers", "per step", [float(sum(ms > LATE_MS for ms in waits)) for waits in found]),
    ]


def measure(cell: FullyShardedCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Measure one cell; only rank 0 is recorded.

    Raises:
        PredictedOutOfMemory: the states of this machine's ranks alone would not fit.
        FloatingPointError: the loss is not finite on some rank.
    """
    needed = check_fit(cell, rank=rank)
    losses = loss_metrics(cell, rank) if cell.losses and cell.repeat == 0 else []
    prepared = PreparedStep(cell, rank)
    synchronize(rank.device)
    meter = PeakMeter(rank.device)
    phases, n_warmup = prepared.phases(), effort.warmup(cell)
    warmup = time_phases_of_ranks(phases, rank, warmup=0, steps=n_warmup) if n_warmup else PhaseTimes()
    with sampled_state(rank.device) as readings:
        times = time_phases_of_ranks(phases, rank, warmup=0, steps=cell.steps)
    times.warmup_ms = warmup.samples_ms.get(WHOLE, [])
    metrics = time_metrics(times, cell) + peak_metrics(meter, rank) + losses
    for name, unit in {"sm_mhz": "MHz", "power_w": "W"}.items():
        if read := readings.values(name):  # a CPU reports neither
            metrics.append(Metric(name, f"{unit}, rank 0's GPU, in the timed steps", read))
    metrics += in_gib(predicted_peak=needed) if is_predictable(cell) else []
    if cell.repeat == 0:
        metrics += _states_and_traffic(prepared, rank)
        metrics += _gather_waits(prepared) if cell.fsdp == OURS else []
    check_losses(prepared.step, rank)
    if (path := effort.recording(cell)) is not None:
        with tempfile.TemporaryDirectory() as folder:
            own = path if rank.rank == 0 else Path(folder, path.name)
            record_phases_of_ranks(prepared.phases(), prepared.step.model, rank, own)
            metrics += breakdown_metrics(kineto.read(own))
    return metrics


def _states_and_traffic(prepared: PreparedStep, rank: Rank) -> list[Metric]:
    """Return bytes held on the fullest rank and sent per rank, each with its prediction."""
    cell: FullyShardedCell = prepared.cell
    predicted = sum(predicted_states(cell, 1 if cell.fsdp == DDP else cell.world_size).values())
    own, sent = _held_and_sent(prepared)
    held = {name: largest(size, rank) for name, size in own.items()}
    state = sum(held.values())
    metrics = [
        *in_gib(**held, state=state, predicted_state=predicted),
        Metric("state_error", "% of predicted", [100 * (state / predicted - 1)]),
        sent_metric(sent, cell.world_size),
    ]
    if cell.fsdp == OURS and cell.accumulate == 1:
        expected = step_traffic(
            model_units(cell.config),
            cell.world_size,
            compute_bytes=cell.weight_bytes,
            gradient_bytes=cell.precision.parameter_bytes,
            peer_copies=cell.gather_by == "copies",
            quantized=quantized_units(cell.recipe, cell.config.n_layers),
        )
        metrics.append(Metric("predicted_sent", "MiB per step and rank, on a ring", [expected.sent_per_rank / MIB]))
    return metrics


def loss_metrics(cell: FullyShardedCell, rank: Rank) -> list[Metric]:
    """Return the ranks' mean loss before each of ``cell.losses`` steps, the reference's, and the largest difference."""
    own, start = _losses(cell, rank)
    reference, _ = _losses(replace(cell, **_EXACT), rank, start)
    off = [100 * abs(loss / right - 1) for loss, right in zip(own, reference, strict=True)]
    unit = "nats, before each step on one batch"
    return [
        Metric("loss", unit, own),
        Metric("reference_loss", f"{unit}, plain PyTorch in fp32", reference),
        Metric("loss_error", "% of the reference's, the most of any step", [max(off)]),
    ]


def _losses(
    cell: FullyShardedCell, rank: Rank, start: dict[str, Tensor] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the ranks' mean loss before each step, and the initial weights, which are ``start`` if given.

    The model is freed and its memory returned to the device, as later allocations have other sizes.
    """
    step, batch = finish(build_model(cell, rank), cell, rank, lr=_STEP / cell.config.d_model), random_batch(cell, rank)
    first: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in step.model.named_parameters():
            if start is None:
                first[name] = weight.detach().clone()
            else:
                weight.copy_(start.pop(name))
    losses = torch.stack([step(*batch) for _ in range(cell.losses)]).double()
    dist.all_reduce(losses)
    del step
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return (losses / rank.world_size).tolist(), first
