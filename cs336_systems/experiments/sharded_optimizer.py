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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from cs336_systems.case import RECIPE, Parallel, TrainingCase
from cs336_systems.costs.sharding import DEFAULT_BUCKET_SIZE_MB
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment, Stage, presented
from cs336_systems.experiments.options import RankedCase, RankedRun, training_cells
from cs336_systems.experiments.ranked import with_effort
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

if TYPE_CHECKING:
    from cs336_systems.harness.sweep import Outcome

Sharding = Literal["replicated", "owned", "scattered", "torch-zero"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

MOMENTS = ("initialised", "after_forward", "before_step", "after_step")


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


make_cells = partial(training_cells, ShardingCell)
"""The grid, the ways to hold the state innermost."""


def stages(options: Any, cells: Sequence[ShardingCell], outcomes: list[Outcome]) -> list[Stage]:
    """All cells by one measurement."""
    from cs336_systems.experiments.sharded_optimizer_measure import measure

    return list(with_effort(measure)(options, cells, outcomes))


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


EXPERIMENT = Experiment(
    "benchmark_sharded_optimizer",
    ShardingCell,
    make_cells,
    stages,
    presented(lambda rows: (TIMES.of(rows), MEMORY.of(rows))),
    (
        *("forward", "backward", "optimizer", "step"),
        *("after_step_optimizer_state", "predicted_optimizer_state", "after_step_allocated", "before_step_peak"),
    ),
    options=Options,
)
