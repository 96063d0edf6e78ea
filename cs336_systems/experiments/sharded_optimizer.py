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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from cs336_systems.case import RECIPE, Parallel, TrainingCase
from cs336_systems.costs.sharding import DEFAULT_BUCKET_SIZE_MB, link_bytes_per_step, state_bytes_by_rank
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment, presented
from cs336_systems.experiments.options import RankedCase, RankedRun, training_cells
from cs336_systems.experiments.ranked import EFFORT, Effort, check_losses, time_metrics, with_effort
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor

    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.record import Metric

Sharding = Literal["replicated", "owned", "scattered", "torch-zero"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

MOMENTS = ("initialised", "after_forward", "before_step", "after_step")

CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "other")


@dataclass(frozen=True)
class ShardingCell(RankedCase):
    """One way to hold the state of one model; the fields are columns, sizes are per rank."""

    dtype: str = like(TrainingCase, "dtype", values=("fp32", "tf32", "bf16", "autocast-bf16"))
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
        return Parallel(wrapper, optimizer_state=self.sharding, bucket_size_mb=self.bucket_size_mb)

    def __str__(self) -> str:
        return f"{self.sharding} on {self.world_size} ranks: {super().__str__()}"


@dataclass(frozen=True)
class Asked(RankedRun):
    """What does sharding the optimizer state save, and what does it cost?"""

    CPU_DEFAULTS: ClassVar = RankedRun.CPU_DEFAULTS | {"bucket_size_mb": (0.1,), "warmup": 1, "steps": 5}
    timeout: float = 600.0


Options: Any = options_of(ShardingCell, Asked, size=("xl",))


def make_cells(options: Any) -> list[ShardingCell]:
    """The grid, the ways to hold the state innermost; raises ValueError for a value that no cell can have."""
    return training_cells(ShardingCell, options)


def measure(cell: ShardingCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Build one model and its optimizer, read the memory of its second step, then time its steps.

    Raises:
        PredictedOutOfMemory: the case would not fit.
        FloatingPointError: the loss is not finite on every rank.
    """
    import torch.distributed as dist

    from cs336_systems.experiments.measured import in_gib
    from cs336_systems.harness.clock import time_phases_of_ranks
    from cs336_systems.harness.fit import check_fit
    from cs336_systems.training import random_batch
    from cs336_systems.training.assemble import build_model, finish

    check_fit(cell, rank=rank)
    meter = _Meter(rank.device)
    model = build_model(cell, rank)
    meter.read("initialised", model)
    step = finish(model, cell, rank)
    phases = step.phases("step", *random_batch(cell, rank))
    for phase in phases.values():
        phase()
    meter.read_one_step(phases, model, step.optimizer)
    times = time_phases_of_ranks(phases, rank, warmup=effort.warmup(cell), steps=cell.steps)
    check_losses(step, rank)
    of_all: list[Any] = [None] * rank.world_size
    dist.all_gather_object(of_all, meter.readings)
    fullest = max(of_all, key=lambda readings: readings["after_step_optimizer_state"])
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
        self.device = device
        self.readings: dict[str, float] = {}
        self._baseline = 0
        self._baseline = self.allocated()
        self._restart_peak()

    def allocated(self) -> int:
        """Bytes that tensors take beyond the baseline, as ``allocated_bytes`` says."""
        from cs336_systems.harness.memory import allocated_bytes

        return allocated_bytes(self.device) - self._baseline

    def _restart_peak(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read_one_step(
        self, phases: dict[str, Callable[[], None]], model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Read the memory of a step after forward, before the update and after it."""
        import torch.distributed as dist
        from torch import Tensor

        from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

        local = getattr(optimizer, "optim", optimizer)  # torch's ZeRO keeps its state in an optimizer of its own
        state = [value for each in local.state.values() for value in each.values() if isinstance(value, Tensor)]
        before = self.allocated()
        self._restart_peak()
        forward, *others, update = phases.values()
        forward()
        self.read("after_forward", model, state, activations=self.allocated() - before)
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
        import torch

        parameters = list(model.parameters())
        sums = {
            "parameters": sum(parameter.nbytes for parameter in parameters),
            "gradients": sum(each.nbytes for each in (*reduced, *(p.grad for p in parameters if p.grad is not None))),
            "optimizer_state": sum(tensor.nbytes for tensor in state),
        }
        if self.device.type == "cuda":
            allocated = self.allocated()
            sums["activations"] = activations
            sums["other"] = allocated - sum(sums.values())
            sums["allocated"] = allocated
            sums["peak"] = torch.cuda.max_memory_allocated(self.device) - self._baseline
        self.readings |= {f"{moment}_{category}": n_bytes for category, n_bytes in sums.items()}


_SETTINGS = (
    *("gpu", "device", "world_size", "size", "batch_size", "context_length", "dtype", "attention", "compile"),
    *("checkpoint", "optimizer", "accumulate", "kernels", "keep", *RECIPE, "bucket_size_mb", "warmup", "steps"),
    "sharding",
)
_MOST_PANEL_ROWS = 3
"""Models and settings in the figure: the last ones measured."""


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
            note="of the median step, by repeat",
        ),
        Column(
            "GiB per link",
            "predicted_link_traffic",
            optional=True,
            rank=2,
            note="computed, of a ring; broadcasts in full, as they run one after another",
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
        Column("error %", _state_error, "+.2f", optional=True, rank=0, note="of the state, over its prediction"),
        Column("activations GiB", "after_forward_activations", optional=True, rank=2),
        *(Column(f"{m.replace('_', ' ')} GiB", f"{m}_allocated", optional=True, rank=3) for m in MOMENTS),
        Column("peak GiB", "before_step_peak", optional=True),
    ),
)
"""One line per cell: GiB of the fullest rank by category, the state's prediction, and the whole at each moment."""


def memory_figure(rows: pd.DataFrame) -> Figure | None:
    """Draw what takes a rank's memory: a row of panels for each of the last three models and settings.

    A panel is a moment of a step, a stacked bar of GiB a way to hold the state. A line across a bar is what parameters,
    gradients and state were predicted to take.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import OKABE_ITO

    colours = dict(zip(CATEGORIES, OKABE_ITO, strict=False))
    case = [name for name in _SETTINGS if name not in ("warmup", "steps", "sharding")]
    rows = newest(rows, [*case, "sharding"])
    rows = rows[rows["status"] == "ok"]
    groups = [group for _, group in rows.groupby(case, sort=False, dropna=False)][-_MOST_PANEL_ROWS:]
    if not groups:
        return None
    height = max(3.0, 0.45 * rows["sharding"].nunique() + 1.4) * len(groups)
    figure = Figure(figsize=(13, height), layout="constrained")
    subfigures = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for subfigure, group in zip(subfigures, groups, strict=True):
        table = group.pivot_table(index="sharding", columns="metric", values="median", sort=False)
        table = table.loc[group["sharding"].unique()[::-1]]  # bars are drawn from the bottom
        for axes, moment in zip(subfigure.subplots(1, len(MOMENTS), sharex=True, sharey=True), MOMENTS, strict=True):
            names = [f"{moment}_{category}" for category in CATEGORIES]
            widths = table.reindex(columns=names).fillna(0.0)
            for category, name in zip(CATEGORIES, names, strict=True):
                left = widths.loc[:, :name].iloc[:, :-1].sum(axis=1)
                axes.barh(table.index, widths[name], left=left, color=colours[category], height=0.7)
            for place, predicted in enumerate(_predicted(table, moment)):
                axes.vlines(predicted, place - 0.42, place + 0.42, color="black", linewidth=1.5)
            axes.set_title(moment.replace("_", " "), fontsize=10)
            axes.set_xlabel("GiB")
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        first = group.iloc[0]
        subfigure.suptitle(
            f"Memory of one rank of {first['world_size']}: {first['size']}, batch {first['batch_size']}, context "
            f"{first['context_length']}, {first['dtype']}, AdamW {first['optimizer']}, {first['gpu'] or first['host']}",
            fontsize=11,
        )
    drawn = [category for category in CATEGORIES if rows["metric"].str.endswith(f"_{category}").any()]
    handles = [Line2D([], [], color=colours[c], linewidth=8, label=c.replace("_", " ")) for c in drawn]
    handles.append(Line2D([], [], color="black", linewidth=1.5, label="predicted: parameters, gradients, state"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def _predicted(table: pd.DataFrame, moment: str) -> pd.Series:
    """GiB that should be there at a moment of the second step: state after a step, gradients from backward on.

    A step that reduces gradients itself leaves none.
    """
    state = ["optimizer_state"] if moment != "initialised" else []
    held = table[[f"predicted_{name}" for name in ("parameters", *state)]].sum(axis=1)
    if moment not in ("before_step", "after_step"):
        return held
    return held + table["predicted_gradients"] * (table[f"{moment}_gradients"] > 0)


EXPERIMENT = Experiment(
    "benchmark_sharded_optimizer",
    ShardingCell,
    make_cells,
    with_effort(measure),
    presented(lambda rows: (TIMES.of(rows), MEMORY.of(rows)), {"": memory_figure}),
    (
        *("forward", "backward", "optimizer", "step"),
        *("after_step_optimizer_state", "predicted_optimizer_state", "after_step_allocated", "before_step_peak"),
    ),
    options=Options,
)
