"""What does each form of data parallelism gain? One training step on every rank, and what communication adds to it.

**Exposed communication** is the time of a step minus that of the same step without communication (``no_sync``), both
with the same replica in the same process, interleaved: with, without, with. It is everything that synchronisation adds.
A timer around the collectives would start while backward still runs and count the end of backward as communication.
Recordings of both steps (``--trace``) show its parts:

    waited      only collectives run: not hidden by backward, including waits for slower ranks
    slowed      the additional time of the step's other kernels while collectives overlap with them

Replicas diverge in steps without communication, so rank 0's parameters and optimizer state are broadcast after them.
After the measurement every parameter must be bit-identical on all ranks, or the cell fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

from cs336_systems.case import RECIPE
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment
from cs336_systems.experiments.options import RankedCase, RankedRun, training_cells
from cs336_systems.experiments.ranked import (
    EFFORT,
    OVERLAP,
    SCALING,
    SENT,
    Effort,
    PreparedStep,
    check_replicas,
    peak_metrics,
    recording_name,
    scaling,
    sent_metric,
    time_metrics,
    with_earlier_rows,
    with_effort,
)
from cs336_systems.ranks import Parallel
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

if TYPE_CHECKING:
    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.record import Metric

Rung = Literal["naive", "flat", "overlapped", "bucketed", "torch"]

_SIZED = ("bucketed", "torch")
"""Rungs with a bucket size."""

_LOCAL = "local"
"""Prefix of the metrics of the step without communication."""


@dataclass(frozen=True)
class DataParallelCell(RankedCase):
    """One rung on one model; the fields are columns, sizes are per rank."""

    ddp: str = option(
        "naive",
        "naive, flat: after backward, a collective per gradient or one for all; overlapped, bucketed: during backward, "
        "a collective per gradient or per bucket; torch: DistributedDataParallel.",
        values=get_args(Rung),
        asked=get_args(Rung),
    )
    bucket_size_mb: float | None = like(
        *(Parallel, "bucket_size_mb"),
        plain=None,
        help="MiB per bucket, for bucketed and torch; other forms have none.",
        asked=(25.0,),
        typed=float,
    )
    communication_dtype: str = like(Parallel, "communication_dtype")
    max_ctas: int = like(Parallel, "max_ctas")

    @property
    def variant(self) -> str:
        return self.ddp

    @property
    def parallel(self) -> Parallel:
        wrapper = "torch-ddp" if self.ddp == "torch" else self.ddp
        return self.sharing(wrapper, bucket_size_mb=self.bucket_size_mb or 0.0)

    @property
    def name(self) -> str:
        """The stem of its files' names."""
        return recording_name(self, self.ddp, *self._words)

    @property
    def _words(self) -> list[str]:
        """Return words for the rung's settings that are not the defaults."""
        bucket = [] if self.bucket_size_mb is None else [f"{self.bucket_size_mb:g}mb"]
        sent = [] if self.communication_dtype == "same" else [f"sent-{self.communication_dtype}"]
        return bucket + sent + ([f"{self.max_ctas}ctas"] if self.max_ctas else [])

    def __str__(self) -> str:
        return f"{' '.join((self.ddp, *self._words))} on {self.world_size} ranks: {super().__str__()}"


@dataclass(frozen=True)
class Asked(RankedRun):
    """What does each form of data parallelism gain?"""

    trace: Path | None = None
    """Folder for recordings (torch.profiler) and a picture of rank 0 per cell, with and without communication, in the
    first repeat."""
    recorded: tuple[Rung, ...] = ()
    """Forms that --trace records; by default all."""


Options: Any = options_of(DataParallelCell, Asked, cpu=RankedRun.CPU_DEFAULTS | {"warmup": 1, "steps": 6})


def make_cells(options: Any) -> list[DataParallelCell]:
    """The grid."""
    if options.device == "cpu" and (limits := [limit for limit in options.max_ctas if limit]):
        raise ValueError(f"--max-ctas {limits[0]} needs --device cuda: thread blocks are NCCL's, and a CPU has gloo")
    if not {*options.ddp} & {*_SIZED} and options.bucket_size_mb != Options().bucket_size_mb:
        sizes = " ".join(f"{size:g}" for size in options.bucket_size_mb)
        raise ValueError(f"--bucket-size-mb {sizes} is for --ddp {' and '.join(_SIZED)}: other forms have no buckets")
    rungs = [
        {"ddp": rung, "bucket_size_mb": size}
        for rung in options.ddp
        for size in (options.bucket_size_mb if rung in _SIZED else (None,))
    ]
    cells = training_cells(DataParallelCell, options, inner=rungs)
    Effort.check(options, cells)
    return cells


def phases_without_communication(prepared: PreparedStep) -> dict[str, Callable[[], None]]:
    """Return forward, backward and optimizer of a step without communication."""
    no_sync: Callable[[], AbstractContextManager[None]] = prepared.step.model.no_sync  # type: ignore[assignment]

    def quietly(phase: Callable[[], None]) -> None:
        with no_sync():
            phase()

    return {name: run if name == "optimizer" else partial(quietly, run) for name, run in prepared.phases().items()}


def reunite(prepared: PreparedStep) -> None:
    """Broadcast rank 0's parameters and optimizer state."""
    import torch

    from cs336_systems.distributed.buckets import broadcast_from_rank_0

    states = chain.from_iterable(state.values() for state in prepared.step.optimizer.state.values())
    tensors = [each for each in states if isinstance(each, torch.Tensor) and each.device == prepared.rank.device]
    broadcast_from_rank_0(chain(prepared.step.model.parameters(), tensors))


def measure(cell: DataParallelCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Measure one cell; only rank 0 is recorded.

    Steps with communication are timed in two rounds, or in one if it is a single step; steps without it are timed
    between the rounds. Later repeats have one round, and no steps without communication.

    Raises:
        PredictedOutOfMemory: the eager models of this machine's ranks would not fit together.
        RuntimeError: the replicas ended with different parameters.
        FloatingPointError: the loss is not finite.
    """
    from cs336_systems.harness.clock import WHOLE, PhaseTimes, time_phases_of_ranks
    from cs336_systems.harness.memory import PeakMeter, check_fit
    from cs336_systems.harness.record import Metric
    from cs336_systems.profiling.communication import communication_metrics, record_phases_of_ranks
    from cs336_systems.profiling.traces import kineto

    check_fit(cell, rank=rank)
    meter, timed = PeakMeter(rank.device), partial(time_phases_of_ranks, rank=rank)
    prepared, again, metrics = PreparedStep(cell, rank), min(1, cell.warmup), []
    phases, quiet = prepared.phases(), phases_without_communication(prepared)
    second = cell.steps // 2 if cell.repeat == 0 else 0
    rounds = [timed(phases, steps=cell.steps - second, warmup=effort.warmup(cell))]
    if cell.repeat == 0:
        without = timed(quiet, steps=cell.steps, warmup=again).samples_ms
        reunite(prepared)
        rounds += [timed(phases, steps=second, warmup=again)] if second else []
        sent, local = prepared.sent(), median(without[WHOLE])
        steps = [median(times.samples_ms[WHOLE]) for times in rounds]
        metrics += [Metric(f"{_LOCAL}_{name}", "ms", found) for name, found in without.items()]
        metrics += [
            Metric("exposed", "ms, one value per round", [step - local for step in steps], derived=True),
            Metric("exposed_share", "% of the step", [100 * (step - local) / step for step in steps], derived=True),
            Metric("collectives", "per step", [len(sent)]),
            sent_metric(sent, cell.world_size),
        ]
    check_replicas(prepared)
    samples = {name: [ms for times in rounds for ms in times.samples_ms[name]] for name in rounds[0].samples_ms}
    metrics += time_metrics(PhaseTimes(samples, rounds[0].warmup_ms), cell) + peak_metrics(meter, rank)
    if (path := effort.recording(cell)) is not None:
        paths = (path, path.with_name(f"{cell.name}-{_LOCAL}.json.gz"))
        for recorded, own in zip((phases, quiet), paths, strict=True):
            record_phases_of_ranks(recorded, prepared.step.model, rank, own if rank.rank == 0 else None)
        if rank.rank == 0:
            metrics += communication_metrics(*map(kineto.read, paths))
    return metrics


_PEER, _PEER_BUCKET_MIB = "torch", "25"


def _over_torch(line: Line) -> Spread | None:
    """Return the step's ratio to torch DDP's with the same bucket size, or its default for rungs without buckets."""
    if line.settings["ddp"] == _PEER:
        return None
    bucket = line.settings["bucket_size_mb"] or _PEER_BUCKET_MIB
    return line.repeats_over("step", line.peer(ddp=_PEER, bucket_size_mb=bucket))


DATA_PARALLEL = ResultTable(
    settings=(
        *("gpu", "device", "size", "dtype", "attention", "compile", "checkpoint", "optimizer", "batch_size"),
        *("accumulate", "kernels", "keep", *RECIPE, "context_length", "warmup", "steps", "communication_dtype"),
        *("max_ctas", "ddp", "bucket_size_mb", "world_size"),
    ),
    always=("size", "ddp", "bucket_size_mb", "world_size"),
    labels={
        "batch_size": "batch per rank",
        "communication_dtype": "dtype of messages",
        "max_ctas": "thread blocks (0: any)",
        "world_size": "ranks",
        "bucket_size_mb": "bucket MiB",
    },
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN),
        Column("/ torch", _over_torch, ".3f", rank=0, optional=True, note="step / torch's, per repeat"),
        Column("backward ms", "backward", spread=True, rank=3),
        Column("without communication ms", "local_step", spread=True, rank=2),
        Column(
            *("exposed ms", "exposed", ".2f"),
            spread=True,
            note="step minus the mean of the adjacent steps without communication",
        ),
        Column("exposed %", "exposed_share", ".1f", rank=2, note="of the step"),
        *OVERLAP,
        Column(
            *("slowed ms", "slowed", ".2f"),
            rank=2,
            optional=True,
            note="extra time of all other kernels, due to communication",
        ),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("collectives", "collectives", ".0f", rank=3),
        Column("sent MiB", "sent_per_rank", rank=3, note=SENT),
        Column("peak GiB", "peak_memory"),
        Column("scaling %", lambda line: scaling(line, max_ctas=0), ".1f", optional=True, note=SCALING),
    ),
)
"""One line per cell: times, exposed communication, throughput, and scaling from one rank."""

EXPERIMENT = Experiment(
    "benchmark_ddp",
    DataParallelCell,
    make_cells,
    with_effort(measure),
    with_earlier_rows(DATA_PARALLEL.of),
    ("step", "backward", "local_step", "exposed", "exposed_share", "hidden_share", "tokens_per_s", "sent_per_rank"),
    options=Options,
)
