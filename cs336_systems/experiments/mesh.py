"""What do ranks gain by sharing a batch? One training step over a mesh of data, context and tensor ranks.

A cell is one division of the ranks. Those that differ in data alone have batches of their own, so that their tokens
add up; those along context and tensor share one. Scaling compares tokens/s per rank with those of one rank alone on the
same batch: it is 100 % where sharing costs nothing, and what is missing is communication, smaller matrices, and work
that every rank does. Recorded steps (``--trace``) say how long nothing but communication runs.

When all is measured, every parameter must be the same bits on the ranks that hold it alike, or the cell fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.case import RECIPE, Parallel, TrainingCase
from cs336_systems.costs.fsdp import model_units, step_traffic
from cs336_systems.costs.parallelism.step import context_sent, tensor_sent
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment
from cs336_systems.experiments.options import RankedCase, RankedRun, training_cells
from cs336_systems.experiments.ranked import (
    EFFORT,
    MIB,
    SCALING,
    Effort,
    PreparedStep,
    check_replicas,
    peak_metrics,
    recording_name,
    scaling,
    time_metrics,
    with_earlier_rows,
    with_effort,
)
from cs336_systems.report.results import MAIN, Column, ResultTable

if TYPE_CHECKING:
    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.record import Metric

DATA = {"ddp": "bucketed", "fsdp": "fsdp"}
"""What wraps the model over ranks with the same weights."""


_COUNT_BYTES = 8
"""Bytes of the number of targets, which ranks that share a mesh add up."""


@dataclass(frozen=True)
class MeshCell(RankedCase):
    """One division of the ranks; the fields are columns, the batch is that of the ranks that share it."""

    dtype: str = like(TrainingCase, "dtype", values=("fp32", "tf32", "bf16"))
    keep: str = like(TrainingCase, "keep", asked=("products",))
    tensor: int = like(Parallel, "tensor", asked=(1, 2))
    context: int = like(Parallel, "context", asked=(1, 2))
    context_order: str = like(Parallel, "context_order")
    weights: str = option(
        "ddp",
        "How ranks along data and context hold the weights they share: ddp, whole with averaged gradients; fsdp, in "
        "shards.",
        values=tuple(DATA),
        shown=True,
    )

    @property
    def variant(self) -> str:
        return "-".join(self._words)

    @property
    def parallel(self) -> Parallel:
        alone = self.world_size == self.tensor and self.context == 1
        return Parallel(
            "none" if alone else DATA[self.weights],
            tensor=self.tensor,
            context=self.context,
            context_order=self.context_order,
        )

    @property
    def name(self) -> str:
        """The stem of its files' names."""
        return recording_name(self, *self._words, *([self.weights] if self.world_size > self.tensor else []))

    @property
    def _words(self) -> list[str]:
        """The dimensions that have several ranks."""
        n_data = self.world_size // self.parallel.ranks_per_batch
        sizes = {self.weights: n_data, self.context_order: self.context, "tensor": self.tensor}
        return [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["alone"]

    def __str__(self) -> str:
        return f"{' '.join(self._words)} on {self.world_size} ranks: {super().__str__()}"


@dataclass(frozen=True)
class Asked(RankedRun):
    """What do ranks gain by sharing a batch?"""

    trace: Path | None = None
    """Folder for recordings (torch.profiler) and a picture of rank 0 per cell, in the first repeat."""


Options: Any = options_of(MeshCell, Asked, cpu=RankedRun.CPU_DEFAULTS | {"batch_size": (2,), "warmup": 1, "steps": 4})


def make_cells(options: Any) -> list[MeshCell]:
    """The grid of the divisions that the numbers of ranks have.

    Raises:
        ValueError: a value that no cell can have, or no division fits.
    """
    asked = [(tensor, context) for tensor in options.tensor for context in options.context]
    ranks = options.world_size
    fitting = [{"tensor": t, "context": c} for t, c in asked if any(n % (t * c) == 0 for n in ranks)]
    plain: dict[str, Any] = {"weights": "ddp", "context_order": MeshCell.context_order}
    cells = []
    for cell in training_cells(MeshCell, options, inner=fitting or [{"tensor": 1, "context": 1}]):
        matters = {"weights": cell.world_size > cell.tensor, "context_order": cell.context > 1}
        if cell.world_size % cell.parallel.ranks_per_batch == 0:
            cells.append(replace(cell, **{name: plain[name] for name in plain if not matters[name]}))
    cells = list(dict.fromkeys(cells))
    if not cells or not fitting:
        divisions = ", ".join(f"tensor {tensor} x context {context}" for tensor, context in asked)
        raise ValueError(f"--world-size {' '.join(map(str, ranks))} cannot be divided into {divisions}")
    return cells


def predicted_messages(cell: MeshCell, rank: int) -> float | None:
    """Bytes that a rank sends in a step, by arithmetic; None for shards of several micro-batches or tied weights."""
    how, config, itemsize = cell.parallel, cell.config.part(cell.tensor), cell.precision.parameter_bytes
    n_rows = cell.batch_size * cell.context_length // cell.context
    place = rank // cell.tensor % cell.context
    sent = tensor_sent(config, n_rows, cell.keep, cell.tensor, itemsize)
    sent += context_sent(config, n_rows, cell.keep, cell.context, itemsize, rank=place, order=cell.context_order)
    n_bytes, n_replicas, units = cell.accumulate * sent.total(), cell.world_size // cell.tensor, model_units(config)
    if n_replicas == 1:
        return n_bytes
    counted = _COUNT_BYTES if how.ranks_per_batch > 1 else 0
    if how.wrapper == "fsdp":
        messages = step_traffic(units, n_replicas, compute_bytes=itemsize, gradient_bytes=itemsize).messages
        scattered = messages["reduce-scatter"] // n_replicas
        of_data = messages["all-gather"] + scattered + messages["all-reduce"]
        return n_bytes + of_data + counted if cell.accumulate == 1 and not config.tie_embeddings else None
    return n_bytes + config.n_parameters * itemsize + sum(map(len, units)) + counted  # a byte says who has a gradient


def measure(cell: MeshCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Everything about one cell; the recording is of rank 0.

    Raises:
        PredictedOutOfMemory: the step would not fit beside those of this machine's other ranks.
        RuntimeError: ranks that hold the same weights ended with different ones.
        FloatingPointError: the loss is not finite.
    """
    from cs336_systems.harness.clock import in_gib, time_phases_of_ranks
    from cs336_systems.harness.memory import PeakMeter, check_fit
    from cs336_systems.harness.record import Metric
    from cs336_systems.profiling.communication import communication_metrics, record_phases_of_ranks
    from cs336_systems.profiling.traces import kineto

    predicted = check_fit(cell, rank=rank)
    meter, prepared = PeakMeter(rank.device), PreparedStep(cell, rank)
    phases = prepared.phases()
    times = time_phases_of_ranks(phases, rank, steps=cell.steps, warmup=effort.warmup(cell))
    metrics = time_metrics(times, cell) + peak_metrics(meter, rank) + in_gib(predicted_peak=predicted)
    if cell.repeat == 0:
        sent = prepared.sent()
        metrics += [
            Metric("collectives", "per step", [len(sent)]),
            Metric("messages", "MiB per step", [sum(each.n_bytes for each in sent if each.kind != "recv") / MIB]),
        ]
        if (predicted_bytes := predicted_messages(cell, rank.rank)) is not None:
            metrics.append(Metric("predicted_messages", "MiB per step", [predicted_bytes / MIB]))
    check_replicas(prepared)
    if (path := effort.recording(cell)) is not None:
        record_phases_of_ranks(phases, prepared.step.model, rank, path if rank.rank == 0 else None)
        if rank.rank == 0:
            metrics += communication_metrics(kineto.read(path))
    return metrics


MESH = ResultTable(
    settings=(
        *("gpu", "device", "size", "dtype", "attention", "compile", "checkpoint", "optimizer", "batch_size"),
        *("accumulate", "kernels", "keep", *RECIPE, "context_length", "warmup", "steps", "weights", "context_order"),
        *("world_size", "tensor", "context"),
    ),
    always=("size", "world_size", "tensor", "context"),
    labels={"batch_size": "batch", "world_size": "ranks", "context_order": "order"},
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN),
        Column("forward ms", "forward", rank=3),
        Column("backward ms", "backward", rank=3),
        Column("optimizer ms", "optimizer", rank=3),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("scaling %", lambda line: scaling(line, tensor=1, context=1), ".1f", optional=True, note=SCALING),
        Column("hidden %", "hidden_share", ".1f", rank=2, optional=True, note="communication beside other kernels"),
        Column("waited ms", "waited", ".2f", rank=2, optional=True, note="only communication runs"),
        Column("collectives", "collectives", ".0f", rank=3),
        Column("messages MiB", "messages", note="outputs of gathers and reduce-scatters, what is reduced or sent"),
        Column("predicted MiB", "predicted_messages", rank=3, note="the messages"),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak", rank=2, note="the peak"),
    ),
)
"""One line per cell: times, throughput and scaling from one rank, communication, memory."""

EXPERIMENT = Experiment(
    "benchmark_parallelism",
    MeshCell,
    make_cells,
    with_effort(measure),
    with_earlier_rows(MESH.of),
    ("step", "tokens_per_s", "waited", "peak_memory", "predicted_peak"),
    options=Options,
)
