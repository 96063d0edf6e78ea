"""What does full sharding save, and what does it cost? Time, memory by kind, what is sent and what is waited for.

A cell is one implementation: this suite's, torch's FSDP2 (``fully_shard`` of the embedding, of every block, and of norm
and head, as torchtitan applies it), or this suite's bucketed DDP without sharding. All run the same model from the same
seed on the same data. They have FP32 master weights and, under ``bf16-compute``, bf16 weights and fp32 reductions (DDP
then computes under bf16 autocast), or everything in bf16. Repeats of the grid measure them interleaved.

For a recorded step a second table divides its time by phase and kind of work; the parts add up to the step
(``profiling/communication.py``). With a hand-written backward and a known device it also shows each part's lower bound
(``costs/speed_of_light.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from cs336_systems.case import RECIPE, TrainingCase
from cs336_systems.config import PHASES, PRECISIONS, Precision, resolve_size
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.costs.speed_of_light import least_ms
from cs336_systems.declared import flag, like, option, options_of
from cs336_systems.experiments.driver import Experiment, measured_by
from cs336_systems.experiments.options import TORCH_AT_ITS_FASTEST, RankedCase, RankedRun, in_turns, training_cells
from cs336_systems.experiments.ranked import (
    SCALING,
    SENT,
    Effort,
    recording_name,
    scaling,
    with_earlier_rows,
    with_effort,
)
from cs336_systems.hardware import find_hardware
from cs336_systems.ranks import GatherBy, Parallel
from cs336_systems.report.results import MAIN, MISSING, Column, Line, ResultTable, Spread
from cs336_systems.report.tables import Table, show

if TYPE_CHECKING:
    import pandas as pd

    from cs336_systems.harness.sweep import Outcome

Implementation = Literal["ours", "torch", "ddp"]
OURS, TORCH, DDP = get_args(Implementation)
BF16_COMPUTE = "bf16-compute"

_WRAPPERS = {OURS: "fsdp", TORCH: "fsdp2", DDP: "bucketed"}
_OF_OURS = {"prefetch": None, "update": "after-backward", "gather_by": "collectives"}
"""Settings of this suite's implementation only, and the values that others' cells have in these columns."""


@dataclass(frozen=True)
class FullyShardedCell(RankedCase):
    """One implementation on one model; the fields are columns, sizes are per rank."""

    dtype: str = like(
        *(TrainingCase, "dtype"),
        values=("fp32", BF16_COMPUTE, "bf16"),
        help="fp32; bf16-compute: FP32 master weights, bf16 weights gathered for computing, fp32 reductions (ddp: "
        "autocast); or bf16: weights, gradients, their reductions and moments.",
    )
    fsdp: str = option(
        OURS,
        "ours: this suite's; torch: fully_shard of every block; ddp: this suite's bucketed data parallelism, where it "
        "fits.",
        values=get_args(Implementation),
        asked=get_args(Implementation),
    )
    prefetch: int | None = like(Parallel, "prefetch", plain=None, asked=(1,), typed=int)
    """None for other implementations than ours."""
    update: str = like(Parallel, "update")
    gather_by: GatherBy = like(Parallel, "gather_by")
    losses: int = option(
        0,
        "Steps on one batch, run first, whose losses are compared with those of the reference in fp32.",
        several=False,
        sign="not negative",
    )

    @property
    def variant(self) -> str:
        return self.fsdp

    @property
    def precision(self) -> Precision:
        """The precision of the step itself: FSDP casts weights, DDP uses autocast."""
        if self.dtype == BF16_COMPUTE:
            return PRECISIONS["autocast-bf16" if self.fsdp == DDP else "fp32"]
        return PRECISIONS[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of a gathered weight."""
        return 2 if self.dtype == BF16_COMPUTE else self.precision.parameter_bytes

    @property
    def parallel(self) -> Parallel:
        dtype, ahead = "bf16" if self.dtype == BF16_COMPUTE else "same", 1 if self.prefetch is None else self.prefetch
        return self.sharing(_WRAPPERS[self.fsdp], compute_dtype=dtype, prefetch=ahead)

    @property
    def _unusual(self) -> list[str]:
        """Return words for settings of this suite's implementation that are not the defaults."""
        ahead = [] if self.prefetch is None else [f"ahead{self.prefetch}"]
        return ahead + [
            getattr(self, name) for name in ("update", "gather_by") if getattr(self, name) != _OF_OURS[name]
        ]

    @property
    def name(self) -> str:
        """The stem of its files' names."""
        return f"{recording_name(self, self.checkpoint, self.fsdp, *self._unusual)}-{self.repeat}"

    def __str__(self) -> str:
        return f"{' '.join((self.fsdp, *self._unusual))} on {self.world_size} ranks: {super().__str__()}"


@dataclass(frozen=True)
class Asked(RankedRun):
    """What does full sharding save, and what does it cost?"""

    CPU_DEFAULTS: ClassVar = RankedRun.CPU_DEFAULTS | {"warmup": 2, "steps": 5}
    peer_checkpoint: tuple[str, ...] = ()
    """Also measure torch's FSDP2 at its fastest (compiled, cuDNN's attention, torch's fused AdamW) beside every cell,
    with these --checkpoint policies."""
    trace: Path | None = None
    """Folder for a recording (torch.profiler) and a picture of rank 0 per cell, in the first repeat."""
    recorded: tuple[Implementation, ...] = ()
    """Implementations that --trace records; by default all."""


Options: Any = options_of(FullyShardedCell, Asked, size=("xl",))

_PEER: dict[str, Any] = TORCH_AT_ITS_FASTEST | _OF_OURS | {"fsdp": TORCH, "losses": 0}


def make_cells(options: Any) -> list[FullyShardedCell]:
    """Return the grid, interleaved with its peers."""
    asked = {name: getattr(options, name) for name in _OF_OURS}
    for name, values in asked.items():
        if OURS not in options.fsdp and values != getattr(Options, name):
            raise ValueError(f"{flag(name)} is for --fsdp {OURS}, which is not among {', '.join(options.fsdp)}")
    if "copies" in options.gather_by and BF16_COMPUTE in options.dtype:
        raise ValueError(f"--gather-by copies is for weights as they are stored, and --dtype {BF16_COMPUTE} casts them")
    ways = [dict(zip(asked, values, strict=True)) for values in itertools.product(*asked.values())]
    sides = [{"fsdp": name, **way} for name in options.fsdp for way in (ways if name == OURS else [_OF_OURS])]
    cells = training_cells(FullyShardedCell, options, inner=sides)
    policies = [canonical_policy(policy) for policy in options.peer_checkpoint]
    cells = in_turns(cells, lambda cell: [replace(cell, **_PEER, checkpoint=policy) for policy in policies])
    Effort.check(options, cells)
    return cells


_WORK = {"gpu", "device", "size", "dtype", "batch_size", "accumulate", "context_length", "world_size"}
"""Settings that are equal if two cells do the same work."""
_OURS_ALONE = {"fsdp", "do_bench", "losses", *_OF_OURS}
"""Settings that are ignored when a peer is said to have the same settings."""


def _over_fsdp2(line: Line) -> Spread | None:
    """Return the step's ratio to torch's fastest: among lines with the same settings, or else among all."""
    if line.settings["fsdp"] == TORCH:
        return None
    for names in (line.settings.keys() - _OURS_ALONE, line.settings.keys() & _WORK):
        wanted = {name: line.settings[name] for name in names} | {"fsdp": TORCH}
        peers = [other for other in line.lines.values() if other.settings.items() >= wanted.items()]
        if timed := [peer for peer in peers if "step" in peer.metrics]:
            return line.repeats_over("step", min(timed, key=lambda peer: float(peer.metrics["step"]["median"])))
    return None


FULLY_SHARDED = ResultTable(
    settings=(
        *("gpu", "device", "size", "dtype", "attention", "checkpoint", "compile", "optimizer", "batch_size"),
        *("accumulate", "kernels", "keep", *RECIPE, "context_length", "warmup", "steps", "world_size", "fsdp"),
        *("prefetch", "update", "gather_by", "do_bench", "master", "losses"),
    ),
    always=("size", "world_size", "fsdp", "prefetch"),
    labels={"batch_size": "batch per rank", "world_size": "ranks", "fsdp": "implementation"},
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN),
        Column("/ FSDP2", _over_fsdp2, ".3f", rank=0, note="step / the fastest FSDP2's, per repeat"),
        Column(
            "loss off %",
            "loss_error",
            ".3f",
            optional=True,
            note="largest difference of any step from the fp32 reference, on one batch from the same weights",
        ),
        Column("forward ms", "forward", rank=2),
        Column("backward ms", "backward", rank=2),
        Column("optimizer ms", "optimizer", rank=2),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("scaling %", scaling, ".1f", optional=True, note=SCALING),
        Column("parameters GiB", "parameters", rank=3),
        Column("gradients GiB", "gradients", rank=3),
        Column("optimizer GiB", "optimizer_state", rank=3),
        Column(
            "states to predicted %",
            "state_error",
            "+.2f",
            rank=2,
            note="parameters, gradients and optimizer state of the rank with most, minus predicted",
        ),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak", rank=2, optional=True, note="the peak"),
        Column("MHz", "sm_mhz", ".0f", rank=2, optional=True, note="clock of rank 0's GPU in the timed steps"),
        Column("W", "power_w", ".0f", rank=2, optional=True, note="its power"),
        Column("sent MiB", "sent_per_rank", rank=2, note=SENT),
        Column("predicted MiB", "predicted_sent", rank=3),
        Column("gathers", "gathers", ".0f", rank=3),
        Column("late", "late_gathers", ".0f", rank=2, note="gathers not complete when needed"),
        Column("waited ms", "gather_wait", ".3f", spread=True, rank=2, note="for all gathers of a step"),
    ),
)
"""One line per cell: step times, states and peak, communication and waits for weights."""


def recorded_lines(rows: pd.DataFrame) -> list[Line]:
    """The cells whose steps were recorded."""
    return [line for line in FULLY_SHARDED.lines(rows) if "forward_products" in line.metrics]


def _least(said: Mapping[str, Any]) -> Mapping[tuple[str, str], float]:
    """Return lower bounds in ms by phase and kind for a line's settings; empty if unknown."""
    hardware, precision = find_hardware(str(said["gpu"])), PRECISIONS.get(str(said["dtype"]))
    if hardware is None or hardware.memory_bytes_per_s is None or precision is None or said["keep"] == "autograd":
        return {}
    context_length, config = int(said["context_length"]), resolve_size(str(said["size"]))
    work = config.at_context(context_length), int(said["batch_size"]), context_length
    return least_ms(*work, precision, hardware, n_shards=int(said["world_size"]))


def breakdown_table(line: Line) -> Table:
    """Return a table with a row per kind of work and one for all: milliseconds of each phase, and lower bounds."""
    import pandas as pd

    from cs336_systems.profiling.communication import KINDS

    said, least = line.settings, _least(line.settings)
    frame = pd.DataFrame(index=pd.Index(KINDS, name="kind"))
    for phase in PHASES:
        frame[f"{phase} ms"] = [line.median(f"{phase}_{kind}") or 0.0 for kind in KINDS]
        frame[f"{phase} least"] = [least.get((phase, kind), math.nan) for kind in KINDS]
    step, bound = (frame.filter(like=ending).sum(axis=1) for ending in (" ms", " least"))
    frame = frame.assign(**{"step ms": step, "above least": step - bound if least else math.nan})
    frame.loc["all"] = frame.drop(columns=[f"{phase} least" for phase in PHASES]).sum(min_count=1)
    where = f"{said['batch_size']} x {said['context_length']} tokens on each of {said['world_size']} ranks"
    caption = f"A recorded step of {said['fsdp']}, {said['size']}, {where}, {said['dtype']}, keep {said['keep']}"
    note = {"above least": "at the datasheet's peaks; recomputed are attention's scores alone"}
    return Table(caption, frame.map(lambda ms: MISSING if ms != ms else f"{ms:,.1f}").reset_index(), note)


def breakdown_tables(rows: pd.DataFrame) -> str:
    """The tables of all recorded cells, as Markdown."""
    return "\n\n".join(breakdown_table(line).markdown() for line in recorded_lines(rows))


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
    """Shows the table, and where the time of recorded steps goes."""
    from cs336_systems.harness.sweep import outcome_rows

    with_earlier_rows(FULLY_SHARDED.of)(outcomes, options, csv)
    for line in recorded_lines(outcome_rows(outcomes)):
        show(breakdown_table(line), options.format)


EXPERIMENT = Experiment(
    "benchmark_fsdp",
    FullyShardedCell,
    make_cells,
    with_effort(measured_by("fully_sharded_measure")),
    present,
    (
        *("step", "tokens_per_s", "parameters", "gradients", "optimizer_state", "state_error", "peak_memory"),
        *("sent_per_rank", "gathers", "late_gathers", "gather_wait"),
    ),
    options=Options,
)
