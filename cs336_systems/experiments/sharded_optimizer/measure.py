"""One training step with four ways to hold optimizer state: its time, and its memory by category at four moments.

    replicated   AdamW on every rank, gradients averaged by ``BucketedDDP``
    owned        ``ShardedOptimizer``, gradients averaged by ``BucketedDDP``: the handout's form
    scattered    ``ShardedOptimizer(reduce_gradients="reduce-scatter")``, without DDP: ZeRO stage 1
    torch-zero   torch's ``ZeroRedundancyOptimizer``, parameters as bucket views, gradients averaged by ``BucketedDDP``

Memory is read in the second step, when all state exists: after the model is built, when forward has left its
activations, directly before and directly after the update (gradients not yet cleared). Parameters, gradients and
optimizer state are exact sums of tensor bytes. On a GPU ``torch.cuda.memory_allocated`` gives the whole; activations
are what forward added to it, and the rest is ``other`` (workspaces, buffers, padding). A CPU has the sums only. All
figures are those of the rank that holds the most optimizer state, so that they add up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.costs.sharding import link_bytes_per_step, state_bytes_by_rank
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.ranked import EFFORT, Effort, check_losses
from cs336_systems.experiments.sharded_optimizer.cells import ShardingCell
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import time_phases_of_ranks
from cs336_systems.harness.fit import check_fit
from cs336_systems.harness.memory import allocated_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.training import random_batch
from cs336_systems.training.assemble import build_model, finish

MOMENTS = ("initialised", "after_forward", "before_step", "after_step")

CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "other")


def measure_sharding(cell: ShardingCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Build one model and its optimizer, read the memory of its second step, then time its steps.

    Raises:
        PredictedOutOfMemory: the case would not fit.
        FloatingPointError: the loss is not finite on every rank.
    """
    check_fit(cell, rank=rank)
    meter = _Meter(rank.device)
    model = build_model(cell, rank)
    parameters = list(model.parameters())
    meter.read("initialised", parameters, [])
    step = finish(model, cell, rank)
    phases = step.phases("step", *random_batch(cell, rank))
    for phase in phases.values():
        phase()
    _read_one_step(meter, phases, parameters, step.optimizer)
    times = time_phases_of_ranks(phases, rank, warmup=effort.warmup(cell), steps=cell.steps)
    check_losses(step, rank)
    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    sizes = [parameter.nbytes for parameter in parameters]
    form = "owned" if cell.sharding == "torch-zero" else cell.sharding  # torch's ZeRO deals tensors out as owned does
    bucket_bytes = int(cell.bucket_size_mb * 1024**2)
    moments = state_bytes_by_rank(form, sizes, rank.world_size, per_parameter=2, bucket_bytes=bucket_bytes)
    predicted = {
        "predicted_parameters": sum(sizes),
        "predicted_gradients": sum(sizes),
        "predicted_optimizer_state": max(moments),
        "predicted_link_traffic": link_bytes_per_step(form, sum(sizes), rank.world_size),
    }
    in_bytes = meter.of_the_fullest_rank(rank.world_size) | predicted
    return metrics + [Metric(name, "GiB", [n_bytes / GIB]) for name, n_bytes in in_bytes.items()]


def _read_one_step(
    meter: "_Meter",
    phases: dict[str, Callable[[], None]],
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    state = _state_tensors(optimizer)
    before = meter.allocated()
    meter.restart_peak()
    forward, *others, update = phases.values()
    forward()
    meter.read("after_forward", parameters, state, activations=meter.allocated() - before)
    for phase in others:
        phase()
    meter.read("before_step", parameters, state)
    meter.restart_peak()
    handle = optimizer.register_step_post_hook(lambda *_: meter.read("after_step", parameters, state))
    update()
    handle.remove()


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's; torch's ZeRO keeps it in an optimizer of its own, ``optim``."""
    local = getattr(optimizer, "optim", optimizer)
    return [value for state in local.state.values() for value in state.values() if isinstance(value, Tensor)]


class _Meter:
    """Bytes by moment and category on this rank, from construction on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: dict[str, float] = {}
        self._baseline = allocated_bytes(device)
        self.restart_peak()

    def allocated(self) -> int:
        """What tensors take beyond the baseline, as ``allocated_bytes`` says."""
        return allocated_bytes(self.device) - self._baseline

    def restart_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self, moment: str, parameters: Sequence[Tensor], state: Sequence[Tensor], activations: int = 0) -> None:
        """Note what there is now; activations are counted where forward has just ended."""
        sums = {
            "parameters": sum(parameter.nbytes for parameter in parameters),
            "gradients": sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
            "optimizer_state": sum(tensor.nbytes for tensor in state),
        }
        if self.device.type == "cuda":
            allocated = self.allocated()
            sums["activations"] = activations
            sums["other"] = allocated - sum(sums.values())
            sums["allocated"] = allocated
            sums["peak"] = torch.cuda.max_memory_allocated(self.device) - self._baseline
        self.readings |= {f"{moment}_{category}": n_bytes for category, n_bytes in sums.items()}

    def of_the_fullest_rank(self, world_size: int) -> dict[str, float]:
        """The readings of the rank with the most optimizer state, the first of equals, on every rank."""
        of_all: list[Any] = [None] * world_size
        dist.all_gather_object(of_all, self.readings)
        return max(of_all, key=lambda readings: readings["after_step_optimizer_state"])
