"""What does sharding the optimizer state save, and what does it cost? Time, and memory by category at four moments.

    replicated   AdamW on every rank, gradients averaged by ``BucketedDDP``
    owned        ``ShardedOptimizer``, gradients averaged by ``BucketedDDP``: the handout's form
    scattered    ``ShardedOptimizer(reduce_gradients="reduce-scatter")``, without DDP: ZeRO stage 1
    torch-zero   torch's ``ZeroRedundancyOptimizer``, parameters as bucket views, gradients averaged by ``BucketedDDP``

Memory is read in the second step, when all state exists: after the model is built, when forward has left its
activations, directly before and directly after the update (gradients not yet cleared). ``scattered`` holds a rank's
shard of the gradients until the update, and none after it. Parameters, gradients and optimizer state are exact sums of
tensor bytes. On a GPU ``torch.cuda.memory_allocated`` gives the whole; activations are what forward added to it, and
the rest is ``other`` (workspaces, buffers, padding). A CPU has the sums only. All figures are those of the rank that
holds the most optimizer state, so that they add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from cs336_systems.case import RECIPE
from cs336_systems.costs.sharding import DEFAULT_BUCKET_SIZE_MB, link_bytes_per_step, state_bytes_by_rank
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment, presented
from cs336_systems.experiments.options import RankedCase, RankedRun, training_cells
from cs336_systems.experiments.ranked import EFFORT, Effort, check_losses, time_metrics, with_effort
from cs336_systems.hardware import MIB
from cs336_systems.ranks import Parallel
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.record import Metric
    from cs336_systems.training import TrainStep

Sharding = Literal["replicated", "owned", "scattered", "torch-zero"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

MOMENTS = ("initialised", "after_forward", "before_step", "after_step")


@dataclass(frozen=True)
class ShardingCell(RankedCase):
    """One way to hold the state of one model; the fields are columns, sizes are per rank."""

    warmup: int = like(RankedCase, "warmup", help="Steps before the timed ones, after two in which memory is read.")
    bucket_size_mb: float = like(
        *(Parallel, "bucket_size_mb"),
        plain=DEFAULT_BUCKET_SIZE_MB,
        help="MiB of the buckets in which gradients and parameters are sent (torch-zero sends parameters in one per "
        "rank).",
    )
    sharding: str = option(
        "replicated",
        "Where the optimizer state is held: replicated, owned, scattered, torch-zero.",
        values=SHARDINGS,
        asked=SHARDINGS,
    )

    @property
    def variant(self) -> str:
        return self.sharding

    @property
    def parallel(self) -> Parallel:
        """``scattered`` reduces gradients itself; the others leave that to ``BucketedDDP``."""
        wrapper = "none" if self.sharding == "scattered" else "bucketed"
        return self.sharing(wrapper, optimizer_state=self.sharding)

    def __str__(self) -> str:
        return f"{self.sharding} on {self.world_size} ranks: {super().__str__()}"


@dataclass(frozen=True)
class Asked(RankedRun):
    """What does sharding the optimizer state save, and what does it cost?"""

    CPU_DEFAULTS: ClassVar = RankedRun.CPU_DEFAULTS | {"bucket_size_mb": (0.1,), "warmup": 1, "steps": 5}
    timeout: float = 600.0


Options: Any = options_of(ShardingCell, Asked, size=("xl",))


make_cells = partial(training_cells, ShardingCell)
"""The grid, the ways to hold the state innermost."""


def measure(cell: ShardingCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Build one model and its optimizer, read the memory of its second step, then time its steps.

    Raises:
        PredictedOutOfMemory: the case would not fit.
        FloatingPointError: the loss is not finite on every rank.
    """
    from cs336_systems.distributed.process_group import on_every_rank
    from cs336_systems.harness.clock import in_gib, time_phases_of_ranks
    from cs336_systems.harness.memory import allocated_bytes, check_fit
    from cs336_systems.training import random_batch
    from cs336_systems.training.assemble import build_model, finish

    check_fit(cell, rank=rank)
    baseline = allocated_bytes(rank.device)
    _restart_peak(rank.device)
    model = build_model(cell, rank)
    readings = _held("initialised", model, rank.device, baseline)
    step = finish(model, cell, rank)
    phases = step.phases("step", *random_batch(cell, rank))
    for phase in phases.values():
        phase()
    readings |= _memory_of_a_step(step, phases, rank.device, baseline)
    times = time_phases_of_ranks(phases, rank, warmup=effort.warmup(cell), steps=cell.steps)
    check_losses(step, rank)
    fullest = max(on_every_rank(lambda: readings), key=lambda of_rank: of_rank["after_step_optimizer_state"])
    sizes = [parameter.nbytes for parameter in model.parameters()]
    form = "owned" if cell.sharding == "torch-zero" else cell.sharding  # torch's ZeRO deals tensors out as owned does
    bucket_bytes = int(cell.bucket_size_mb * MIB)
    moments = max(state_bytes_by_rank(form, sizes, rank.world_size, per_parameter=2, bucket_bytes=bucket_bytes))
    predicted = in_gib(
        predicted_parameters=sum(sizes),
        predicted_gradients=moments // 2 if form == "scattered" else sum(sizes),  # reduced, a rank's shard is left
        predicted_optimizer_state=moments,
        predicted_link_traffic=link_bytes_per_step(form, sum(sizes), rank.world_size),
    )
    return [*time_metrics(times, cell), *in_gib(**fullest), *predicted]


def _memory_of_a_step(
    step: TrainStep, phases: dict[str, Callable[[], None]], device: torch.device, baseline: int
) -> dict[str, float]:
    """Bytes after forward, before the update and after it, and the peaks before the update and of it."""
    import torch

    from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
    from cs336_systems.harness.memory import allocated_bytes

    model, optimizer = step.model, step.optimizer
    local: Any = getattr(optimizer, "optim", optimizer)  # torch's ZeRO keeps its state in an optimizer of its own
    state = [value for each in local.state.values() for value in each.values() if isinstance(value, torch.Tensor)]

    before = allocated_bytes(device)
    _restart_peak(device)
    forward, *others, update = phases.values()
    forward()
    added = allocated_bytes(device) - before
    readings = _held("after_forward", model, device, baseline, state, activations=added)
    for phase in others:
        phase()
    reduced: list[Tensor] = []
    if (
        isinstance(optimizer, ShardedOptimizer)
        and optimizer.reduce_gradients
        and torch.distributed.get_world_size() > 1
    ):
        reduced = optimizer.reduced_gradients()
    readings |= _held("before_step", model, device, baseline, state, reduced)
    del reduced  # the step frees them
    _restart_peak(device)
    handle = optimizer.register_step_post_hook(
        lambda *_: readings.update(_held("after_step", model, device, baseline, state))
    )
    update()
    handle.remove()
    return readings


def _restart_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _held(
    moment: str,
    model: nn.Module,
    device: torch.device,
    baseline: int,
    state: Sequence[Tensor] = (),
    reduced: Sequence[Tensor] = (),
    activations: int = 0,
) -> dict[str, float]:
    """Bytes by moment and category on this rank; activations are counted where forward has just ended.

    Args:
        baseline: bytes that were allocated before the model was built.
        reduced: gradients that the optimizer holds, this rank's shard, and no parameter.
    """
    import torch

    from cs336_systems.harness.memory import allocated_bytes

    parameters = list(model.parameters())
    gradients = [*reduced, *(p.grad for p in parameters if p.grad is not None)]
    held: dict[str, Sequence[Tensor]]
    held = {"parameters": parameters, "gradients": gradients, "optimizer_state": state}
    sums = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in held.items()}
    if device.type == "cuda":
        allocated = allocated_bytes(device) - baseline
        other = allocated - activations - sum(sums.values())
        peak = torch.cuda.max_memory_allocated(device) - baseline
        sums |= {"activations": activations, "other": other, "allocated": allocated, "peak": peak}
    return {f"{moment}_{category}": n_bytes for category, n_bytes in sums.items()}


_SETTINGS = (
    *("gpu", "device", "world_size", "size", "batch_size", "context_length", "dtype", "attention", "compile"),
    *("checkpoint", "optimizer", "accumulate", "kernels", "keep", *RECIPE, "bucket_size_mb", "warmup", "steps"),
    "sharding",
)


def _state_error(line: Line) -> float | None:
    state, predicted = line.median("after_step_optimizer_state"), line.median("predicted_optimizer_state")
    return 100 * (state / predicted - 1) if state and predicted else None


TIMES = ResultTable(
    settings=_SETTINGS,
    always=("size", "sharding"),
    labels={"world_size": "ranks", "bucket_size_mb": "bucket MiB", "sharding": "how"},
    columns=(
        Column("forward ms", "forward", optional=True, rank=2),
        Column("backward ms", "backward", optional=True, spread=True, rank=2),
        Column("optimizer ms", "optimizer", optional=True, spread=True),
        Column("total ms", "step", optional=True, spread=True, rank=MAIN),
        Column(
            "ratio to replicated",
            lambda line: line.repeats_over("step", line.peer(sharding="replicated")),
            ".3f",
            rank=0,
            optional=True,
            note="median step, per repeat",
        ),
        Column(
            "GiB per link",
            "predicted_link_traffic",
            optional=True,
            rank=2,
            note="calculated for a ring; broadcasts count in full, as they run one after another",
        ),
    ),
)
"""One line per cell of ``benchmark_sharded_optimizer.py``: its phases, the step as a ratio, bytes on the links."""

MEMORY = replace(
    TIMES,
    columns=(
        Column("parameters GiB", "before_step_parameters", optional=True, rank=2),
        Column("gradients GiB", "before_step_gradients", optional=True, rank=2),
        Column("state GiB", "after_step_optimizer_state", optional=True, rank=MAIN),
        Column("predicted state GiB", "predicted_optimizer_state", optional=True),
        Column("error %", _state_error, "+.2f", optional=True, rank=0, note="of the state from its prediction"),
        Column("activations GiB", "after_forward_activations", optional=True, rank=2),
        *(Column(f"{m.replace('_', ' ')} GiB", f"{m}_allocated", optional=True, rank=3) for m in MOMENTS),
        Column("peak GiB", "before_step_peak", optional=True),
    ),
)
"""One line per cell: GiB of the fullest rank by category, the state's prediction, and the whole at each moment."""


EXPERIMENT = Experiment(
    "benchmark_sharded_optimizer",
    ShardingCell,
    make_cells,
    with_effort(measure),
    presented(lambda rows: (TIMES.of(rows), MEMORY.of(rows))),
    (
        *("forward", "backward", "optimizer", "step"),
        *("after_step_optimizer_state", "predicted_optimizer_state", "after_step_allocated", "before_step_peak"),
    ),
    options=Options,
)
