"""How ``sharded_optimizer.py`` measures a cell: memory by category at four moments of a step, then steps timed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.costs.sharding import link_bytes_per_step, state_bytes_by_rank
from cs336_systems.distributed.process_group import Rank, on_every_rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.experiments.measured import in_gib
from cs336_systems.experiments.ranked import EFFORT, Effort, check_losses, time_metrics
from cs336_systems.experiments.sharded_optimizer import ShardingCell
from cs336_systems.harness.clock import time_phases_of_ranks
from cs336_systems.harness.memory import allocated_bytes, check_fit
from cs336_systems.harness.record import Metric
from cs336_systems.training import TrainStep, random_batch
from cs336_systems.training.assemble import build_model, finish


def measure(cell: ShardingCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Build one model and its optimizer, read the memory of its second step, then time its steps.

    Raises:
        PredictedOutOfMemory: the case would not fit.
        FloatingPointError: the loss is not finite on every rank.
    """
    check_fit(cell, rank=rank)
    meter = _Meter(rank.device)
    model = build_model(cell, rank)
    meter.read("initialised", model)
    step = finish(model, cell, rank)
    phases = step.phases("step", *random_batch(cell, rank))
    for phase in phases.values():
        phase()
    meter.read_one_step(phases, step)
    times = time_phases_of_ranks(phases, rank, warmup=effort.warmup(cell), steps=cell.steps)
    check_losses(step, rank)
    fullest = max(on_every_rank(lambda: meter.readings), key=lambda of_rank: of_rank["after_step_optimizer_state"])
    sizes = [parameter.nbytes for parameter in model.parameters()]
    form = "owned" if cell.sharding == "torch-zero" else cell.sharding  # torch's ZeRO deals tensors out as owned does
    bucket_bytes = int(cell.bucket_size_mb * 1024**2)
    moments = max(state_bytes_by_rank(form, sizes, rank.world_size, per_parameter=2, bucket_bytes=bucket_bytes))
    predicted = in_gib(
        predicted_parameters=sum(sizes),
        predicted_gradients=moments // 2 if form == "scattered" else sum(sizes),  # reduced, a rank's shard is left
        predicted_optimizer_state=moments,
        predicted_link_traffic=link_bytes_per_step(form, sum(sizes), rank.world_size),
    )
    return [*time_metrics(times, cell), *in_gib(**fullest), *predicted]


class _Meter:
    """Bytes by moment and category on this rank, from construction on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.baseline, self.readings = device, allocated_bytes(device), dict[str, float]()
        self._restart_peak()

    def _restart_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read_one_step(self, phases: dict[str, Callable[[], None]], step: TrainStep) -> None:
        """Read the memory of a step after forward, before the update and after it, and the peaks before and of it."""
        model, optimizer = step.model, step.optimizer
        local: Any = getattr(optimizer, "optim", optimizer)  # torch's ZeRO keeps its state in an optimizer of its own
        state = [value for each in local.state.values() for value in each.values() if isinstance(value, Tensor)]
        before = allocated_bytes(self.device)
        self._restart_peak()
        forward, *others, update = phases.values()
        forward()
        self.read("after_forward", model, state, activations=allocated_bytes(self.device) - before)
        for phase in others:
            phase()
        reduced: list[Tensor] = []
        if isinstance(optimizer, ShardedOptimizer) and optimizer.reduce_gradients and dist.get_world_size() > 1:
            reduced = optimizer.reduced_gradients()
        self.read("before_step", model, state, reduced)
        del reduced  # the step frees them
        self._restart_peak()
        handle = optimizer.register_step_post_hook(lambda *_: self.read("after_step", model, state))
        update()
        handle.remove()

    def read(
        self,
        moment: str,
        model: torch.nn.Module,
        state: Sequence[Tensor] = (),
        reduced: Sequence[Tensor] = (),
        activations: int = 0,
    ) -> None:
        """Note what there is now; activations are counted where forward has just ended.

        Args:
            reduced: gradients that the optimizer holds, this rank's shard, and no parameter.
        """
        parameters = list(model.parameters())
        gradients = [*reduced, *(p.grad for p in parameters if p.grad is not None)]
        held: dict[str, Sequence[Tensor]]
        held = {"parameters": parameters, "gradients": gradients, "optimizer_state": state}
        sums = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()}
        if self.device.type == "cuda":
            allocated = allocated_bytes(self.device) - self.baseline
            other = allocated - activations - sum(sums.values())
            peak = torch.cuda.max_memory_allocated(self.device) - self.baseline
            sums |= {"activations": activations, "other": other, "allocated": allocated, "peak": peak}
        self.readings |= {f"{moment}_{category}": n_bytes for category, n_bytes in sums.items()}
