"""What do ranks gain by sharing a batch? One step over a mesh of pipeline, replica, shard, context and tensor ranks.

A cell is one mesh. Data ranks have different batches; context and tensor ranks share one. Scaling is tokens/s per rank
relative to a single rank on the same batch. It is 100 % if sharing costs nothing; the loss is due to communication,
smaller matrices, and work that every rank repeats. Recorded steps (``--trace``) show how long only communication runs.

``mesh_measure.py`` runs a cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.case import RECIPE, TrainingCase
from cs336_systems.config import resolve_size
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.seconds import step_seconds
from cs336_systems.costs.parallelism.step import COPIED_FROM_SINCE, copied_from
from cs336_systems.costs.rates import ours_on
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment, measured_by
from cs336_systems.experiments.options import TORCH_AT_ITS_FASTEST, RankedCase, RankedRun, in_turns, training_cells
from cs336_systems.experiments.ranked import OVERLAP, SCALING, recording_name, scaling, with_earlier_rows, with_effort
from cs336_systems.hardware import find_hardware
from cs336_systems.ranks import PIPELINE, SPLIT_BY_TORCH, TORCH_CONTEXT_ORDERS, Parallel, PipelineBy, TensorBy
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DATA = {"ddp": "bucketed", "fsdp": "fsdp", "fsdp2": "fsdp2"}
"""The data-parallel wrapper of each name."""


@dataclass(frozen=True)
class MeshCell(RankedCase):
    """One mesh of ranks; the fields are columns, and the batch size is per group of ranks that share a batch."""

    part: str = option(
        "step",
        "Work that is timed: step, a training step; attention, one block's attention alone, forward and backward, "
        "without projections.",
        values=("step", "attention"),
        shown=True,
    )
    dtype: str = like(TrainingCase, "dtype", values=("fp32", "tf32", "bf16"), help="Precision.")
    keep: str = like(TrainingCase, "keep", asked=("products",))
    tensor: int = like(Parallel, "tensor", asked=(1, 2))
    tensor_by: TensorBy = like(Parallel, "tensor_by")
    context: int = like(Parallel, "context", asked=(1, 2))
    context_order: str = like(Parallel, "context_order")
    replicas: int = like(Parallel, "replicas")
    pipeline: int = like(Parallel, "pipeline")
    pipeline_schedule: str = like(Parallel, "pipeline_schedule")
    pipeline_chunks: int = like(Parallel, "pipeline_chunks")
    pipeline_by: PipelineBy = like(Parallel, "pipeline_by", values=("messages", "copies", "torch"))
    weights: str = option(
        "ddp",
        "How ranks along data and context hold the weights they share: ddp, whole with averaged gradients; fsdp, in "
        "shards; fsdp2, in shards by PyTorch's FSDP2.",
        values=tuple(DATA),
        shown=True,
    )

    @property
    def variant(self) -> str:
        return "-".join(self._words)

    @property
    def parallel(self) -> Parallel:
        alone = self.world_size == self.tensor * self.pipeline and self.context == 1
        return self.sharing("none" if alone else DATA[self.weights])

    @property
    def attention_alone(self) -> bool:
        return self.part == "attention"

    @property
    def name(self) -> str:
        """The stem of its files' names."""
        return recording_name(
            self,
            *([self.part] if self.part != "step" else []),
            *self._words,
            *([self.weights] if self.parallel.wrapper != "none" else []),
        )

    @property
    def _words(self) -> list[str]:
        """Return words for the dimensions that have several ranks."""
        n_data = self.world_size // self.parallel.ranks_per_batch
        sizes = {"replica": self.replicas, self.weights: n_data // self.replicas}
        sizes |= {self.context_order: self.context, "tensor": self.tensor, self.pipeline_schedule: self.pipeline}
        words = [f"{name}-{size}" for name, size in sizes.items() if size > 1] or ["alone"]
        words += _exchanges(self.tensor_by, self.pipeline_by)
        return words + ["graph"] * (self.cuda_graph == "on")

    def __str__(self) -> str:
        of = "" if self.part == "step" else f"{self.part} of "
        return f"{of}{' '.join(self._words)} on {self.world_size} ranks: {super().__str__()}"


@dataclass(frozen=True)
class Asked(RankedRun):
    """What do ranks gain by sharing a batch?"""

    trace: Path | None = None
    """Folder for recordings (torch.profiler) and a picture of rank 0 per cell, in the first repeat."""
    peer: bool = False
    """Also measure torch's own tensor parallelism and pipelines, compiled and with cuDNN's attention (not on a CPU);
    with --part attention its context parallelism, and cuDNN's attention on one GPU."""


Options: Any = options_of(MeshCell, Asked, cpu=RankedRun.CPU_DEFAULTS | {"batch_size": (2,), "warmup": 1, "steps": 4})


_PLAIN = ("weights", "replicas", "context_order", "tensor_by", *PIPELINE[1:])
PLAIN: dict[str, Any] = {name: getattr(MeshCell, name) for name in _PLAIN}
"""Default values of the columns that may not matter to a cell."""
ALONE = {"tensor": 1, "context": 1, "pipeline": 1} | PLAIN
"""Columns of a cell on a single rank."""


def _exchanges(tensor_by: str, pipeline_by: str) -> list[str]:
    """Names, without spaces, of the ways in which tensor ranks and stages exchange data, other than the defaults."""
    rows = [tensor_by] if tensor_by != PLAIN["tensor_by"] else []
    stages = "copies-of-stages" if pipeline_by == "copies" else pipeline_by
    return rows + [stages] * (pipeline_by != PLAIN["pipeline_by"])


def make_cells(options: Any) -> list[MeshCell]:
    """Return the grid of all meshes of the given numbers of ranks.

    Raises:
        ValueError: a value is invalid for every cell, or no mesh fits.
    """
    asked = [(tensor, context) for tensor in options.tensor for context in options.context]
    ranks = options.world_size
    if options.pipeline_chunks is None:
        options = replace(options, pipeline_chunks=(PLAIN["pipeline_chunks"],))
    elif "interleaved" not in options.pipeline_schedule:
        said, schedules = (" ".join(map(str, each)) for each in (options.pipeline_chunks, options.pipeline_schedule))
        raise ValueError(f"--pipeline-chunks {said} is for --pipeline-schedule interleaved, got {schedules}")
    fitting = [{"tensor": t, "context": c} for t, c in asked if any(n % (t * c) == 0 for n in ranks)]
    cells = []
    for cell in training_cells(MeshCell, options, inner=fitting or [{"tensor": 1, "context": 1}]):
        matters = {"weights": cell.parallel.wrapper != "none", "context_order": cell.context > 1}
        matters |= {"tensor_by": cell.tensor > 1, "replicas": cell.replicas > 1}
        matters |= dict.fromkeys(("pipeline_schedule", "pipeline_by"), cell.pipeline > 1)
        matters |= {"pipeline_chunks": cell.pipeline > 1 and cell.pipeline_schedule == "interleaved"}
        n_data, rest = divmod(cell.world_size, cell.parallel.ranks_per_batch)
        fits = n_data % cell.replicas == 0 and (cell.replicas == 1 or cell.weights == "fsdp")
        if rest == 0 and fits and n_data and (n_data == 1 or cell.part == "step"):
            cells.append(replace(cell, **{name: PLAIN[name] for name in PLAIN if not matters[name]}))
    cells = in_turns(list(dict.fromkeys(cells)), _peers) if options.peer else list(dict.fromkeys(cells))
    if not cells or not fitting:
        divisions = ", ".join(f"tensor {tensor} x context {context}" for tensor, context in asked)
        copies = f", replicas {' '.join(map(str, options.replicas))}" if options.replicas != (1,) else ""
        raise ValueError(f"--world-size {' '.join(map(str, ranks))} cannot be divided into {divisions}{copies}")
    return cells


def _peers(cell: MeshCell) -> list[MeshCell]:
    """Return the cells of torch's tensor, context or pipeline parallelism that are compared with a cell."""
    if cell.attention_alone:
        if cell.tensor > 1 or not (cell.written_out and cell.device.startswith("cuda")):
            return []
        peer = replace(cell, **TORCH_AT_ITS_FASTEST | {"compile": "off"})  # nothing in it would be compiled
        return [replace(peer, context_order=order) for order in TORCH_CONTEXT_ORDERS] if cell.context > 1 else [peer]
    if cell.world_size not in (cell.tensor, cell.pipeline) or cell.parallel.by_torch:
        return []
    on_cpu = {"attention": "reference", "compile": "off"} if cell.device == "cpu" else {}
    peer = replace(cell, **TORCH_AT_ITS_FASTEST | on_cpu)
    if cell.pipeline > 1:
        whole = on_cpu or cell.pipeline_schedule not in SPLIT_BY_TORCH
        return [replace(peer, pipeline_by="torch", compile=peer.compile if whole else "loss")]
    ways: tuple[TensorBy, ...] = ("torch",) if on_cpu else ("torch", "torch-async")
    return [replace(peer, tensor_by=way) for way in ways] if cell.tensor > 1 else [peer]


def predicted_ms(line: Line) -> float | None:
    """Return the step time that ``costs/parallelism/seconds.py`` predicts; None without rates or for torch's blocks."""
    how = line.settings
    hardware = find_hardware(str(how["gpu"]))
    asked = how["part"], how["dtype"], how["matmul_dtype"]
    if hardware is None or asked != ("step", "bf16", "same") or how["keep"] == "autograd":
        return None
    sharing = int(how["tensor"] * how["context"] * how["pipeline"])
    n_data, sharded = int(how["world_size"]) // sharing, how["weights"] != "ddp"
    replicas = int(how["replicas"]) if sharded else n_data
    layout = Layout(
        replicas=replicas,
        shards=n_data // replicas,
        context=int(how["context"]),
        tensor=int(how["tensor"]),
        zero=3 if sharded else 0,
        keep=str(how["keep"]),
        micro_batch=int(how["batch_size"]),
        n_micro_batches=int(how["accumulate"]),
        context_order=str(how["context_order"]),
        tensor_by=str(how["tensor_by"]),
        pipeline=int(how["pipeline"]),
        schedule=str(how["pipeline_schedule"]),
        chunks=int(how["pipeline_chunks"]) if how["pipeline_schedule"] == "interleaved" else 1,
    )
    moment = str(line.last["timestamp"])
    engine: dict[str, Any] = {
        "launches": how["cuda_graph"] == "off",
        "copied_from": copied_from("cuda") if moment >= COPIED_FROM_SINCE else 0,
        "sustained": ours_on(hardware, moment),
    }
    found = step_seconds(resolve_size(str(how["size"])), int(how["context_length"]), layout, hardware, **engine)
    return 1e3 * found.total


MESH = ResultTable(
    settings=(
        *("gpu", "device", "part", "size", "dtype", "attention", "compile", "checkpoint", "optimizer", "batch_size"),
        "cuda_graph",
        *("accumulate", "kernels", "keep", *RECIPE, "context_length", "warmup", "steps", "weights", "tensor_by"),
        *("context_order", "pipeline_schedule", "pipeline_chunks", "pipeline_by", "pipeline"),
        *("world_size", "replicas", "tensor", "context"),
    ),
    always=("part", "size", "world_size", "tensor", "context"),
    labels={
        "batch_size": "batch",
        "context_length": "length",
        "world_size": "ranks",
        "tensor_by": "rows by",
        "pipeline_schedule": "schedule",
        "pipeline_chunks": "chunks",
        "pipeline_by": "stages by",
        "context_order": "order",
    },
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN),
        Column("predicted ms", predicted_ms, optional=True, note="the step, from costs/parallelism/seconds.py"),
        Column("forward ms", "forward", rank=3),
        Column("backward ms", "backward", rank=3),
        Column("passes ms", "passes", rank=3, optional=True, note="forward and backward of all micro-batches"),
        Column("optimizer ms", "optimizer", rank=3),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("scaling %", lambda line: scaling(line, **ALONE), ".1f", optional=True, note=SCALING),
        Column("idle %", "idle", ".1f", optional=True, note="of forward and backward, averaged over stages"),
        Column(
            "predicted idle %", "predicted_idle", ".1f", optional=True, note="from the measured times of operations"
        ),
        *OVERLAP,
        Column("collectives", "collectives", ".0f", rank=3),
        Column(
            "messages MiB", "messages", note="outputs of gathers and reduce-scatters, inputs of all-reduces and sends"
        ),
        Column("predicted MiB", "predicted_messages", rank=3, note="predicted messages MiB"),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak", rank=2, note="the peak"),
    ),
)
"""One line per cell: times, throughput and scaling from one rank, communication, memory."""


def scaling_figure(rows: pd.DataFrame) -> Figure | None:
    """Draw a panel for each part and length: tokens/s per rank, in % of a single rank's, by kind of mesh."""
    from cs336_systems.report.figures import OKABE_ITO, panels

    groups: dict[str, dict[str, float]] = {}
    for line in MESH.lines(rows):
        how = line.settings
        share = scaling(line, **ALONE)
        if share is not None and how["world_size"] > 1:
            panel = f"{how['part']}, {int(how['context_length']):,} tokens"
            groups.setdefault(panel, {})[_way(how)] = share
    if not groups:
        return None
    figure, axes = panels(len(groups), min(2, len(groups)), 4.6, 0.9 + 0.28 * max(map(len, groups.values())))
    for axis, (title, shares) in zip(axes, groups.items(), strict=False):
        bars = axis.barh(list(shares), list(shares.values()), color=OKABE_ITO[0], height=0.7)
        axis.bar_label(bars, [f"{share:.1f}" for share in shares.values()], padding=3, fontsize=8)
        axis.set_xlim(0, 120)
        axis.axvline(100, color="0.5", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("% of one GPU's tokens/s, per GPU", fontsize=9)
        axis.set_ylim(max(map(len, groups.values())) - 0.5, -0.5)
    return figure


def _way(how: Mapping[str, Any]) -> str:
    """Describe a line's mesh in words."""
    sizes = {"tensor": how["tensor"], f"context, {how['context_order']}": how["context"]}
    sizes |= {f"pipeline, {how['pipeline_schedule']}": how["pipeline"]}
    n_data = how["world_size"] // math.prod(sizes.values())
    copies = int(how["replicas"])
    words = [f"replica {copies}"] * (copies > 1) + [f"{how['weights']} {n_data // copies}"] * (n_data > copies)
    words += [f"{name} {n}" for name, n in sizes.items() if n > 1]
    by = _exchanges(how["tensor_by"], how["pipeline_by"])
    return " by ".join([" x ".join(words), *by]) + ", replayed" * (how["cuda_graph"] == "on")


EXPERIMENT = Experiment(
    "benchmark_parallelism",
    MeshCell,
    make_cells,
    with_effort(measured_by("mesh_measure")),
    with_earlier_rows(MESH.of),
    ("step", "tokens_per_s", "waited", "peak_memory", "predicted_peak"),
    options=Options,
)
