"""What does full sharding save, and what does it cost? Time, memory by kind, what is sent and what is waited for.

A cell is one implementation: ours, torch's FSDP2 (``fully_shard`` of the embedding, of every block, and of norm and
head, as torchtitan applies it), or our bucketed DDP, which holds everything whole. All run the same model from the
same seed on the same data, with FP32 master weights and, under ``bf16-compute``, bf16 weights and fp32 reductions (DDP
then computes under bf16 autocast), or with everything in bf16. Repeats of the grid measure them interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from cs336_systems.case import RECIPE, GatherBy, Parallel, TrainingCase
from cs336_systems.config import PRECISIONS, Precision
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.declared import flag, like, option, options_of
from cs336_systems.experiments.driver import Experiment, Stage
from cs336_systems.experiments.options import RankedCase, RankedRun, in_turns, training_cells, within_budget
from cs336_systems.experiments.ranked import (
    SCALING,
    SENT,
    recording_name,
    scaling,
    sent_mib,
    with_earlier_rows,
    with_effort,
)
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cs336_systems.harness.sweep import Outcome

Implementation = Literal["ours", "torch", "ddp"]
OURS, TORCH, DDP = get_args(Implementation)
BF16_COMPUTE = "bf16-compute"

_WRAPPERS = {OURS: "fsdp", TORCH: "fsdp2", DDP: "bucketed"}


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
    do_bench: str = option(
        "off",
        "on: also time the whole step by triton.testing.do_bench, for twice the warm-up and eleven more steps.",
        values=("off", "on"),
        several=False,
    )
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
        """The precision of the step itself: FSDP casts weights on its own, DDP leaves that to autocast."""
        if self.dtype == BF16_COMPUTE:
            return PRECISIONS["autocast-bf16" if self.fsdp == DDP else "fp32"]
        return PRECISIONS[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of a gathered weight."""
        return 2 if self.dtype == BF16_COMPUTE else self.precision.parameter_bytes

    @property
    def parallel(self) -> Parallel:
        return Parallel(
            _WRAPPERS[self.fsdp],
            compute_dtype="bf16" if self.dtype == BF16_COMPUTE else "same",
            prefetch=1 if self.prefetch is None else self.prefetch,
            update=self.update,
            gather_by=self.gather_by,
        )

    @property
    def name(self) -> str:
        """The stem of its files' names."""
        ahead = "" if self.prefetch is None else f"ahead{self.prefetch}"
        under = "" if self.update == "after-backward" else self.update
        copies = "copies" if self.gather_by == "copies" else ""
        return f"{recording_name(self, self.checkpoint, self.fsdp, ahead, under, copies)}-{self.repeat}"

    def __str__(self) -> str:
        ahead = "" if self.prefetch is None else f" {self.prefetch} ahead"
        under = "" if self.update == "after-backward" else f" updated {self.update.replace('-', ' ')}"
        copies = " by copies" if self.gather_by == "copies" else ""
        return f"{self.fsdp}{ahead}{under}{copies} on {self.world_size} ranks: {super().__str__()}"


@dataclass(frozen=True)
class Asked(RankedRun):
    """What does full sharding save, and what does it cost?"""

    CPU_DEFAULTS: ClassVar = RankedRun.CPU_DEFAULTS | {"warmup": 2, "steps": 5}
    peer_checkpoint: tuple[str, ...] = ()
    """Also measure torch's FSDP2 at its fastest (compiled, cuDNN's attention, torch's fused AdamW) beside every cell,
    with these --checkpoint policies."""
    memory_budget_gib: float | None = None
    """Choose what our hand-written blocks keep: what recomputes least among all whose predicted peak fits; the first
    blocks may keep more than the rest."""
    trace: Path | None = None
    """Folder for a recording (torch.profiler) and a picture of rank 0 per cell, in the first repeat."""
    recorded: tuple[Implementation, ...] = ()
    """Implementations that --trace records; by default all."""


Options: Any = options_of(FullyShardedCell, Asked, size=("xl",))

_PEER: dict[str, Any] = {
    "fsdp": TORCH,
    "prefetch": None,
    "update": "after-backward",
    "gather_by": "collectives",
    "kernels": "reference",
    "keep": "autograd",
    "attention": "sdpa-cudnn",
    "compile": "on",
    "optimizer": "torch-fused",
    "losses": 0,
    **{name: getattr(RankedCase, name) for name in ("master", "offload", *RECIPE)},
}
"""Settings with which FSDP2 is as fast as it can be."""


def make_cells(options: Any) -> list[FullyShardedCell]:
    """The grid; under a memory budget with what blocks are to keep, which is told on stderr.

    Raises:
        ValueError: a value that no cell can have, or a budget that nothing fits.
    """
    for name in ("prefetch", "update", "gather_by"):
        if OURS not in options.fsdp and getattr(options, name) != getattr(Options, name):
            raise ValueError(f"{flag(name)} is for --fsdp {OURS}, which is not among {', '.join(options.fsdp)}")
    if "copies" in options.gather_by and BF16_COMPUTE in options.dtype:
        raise ValueError(f"--gather-by copies is for weights as they are stored, and --dtype {BF16_COMPUTE} casts them")
    sides = [
        {"fsdp": name, "prefetch": ahead, "update": update, "gather_by": gather_by}
        for name in options.fsdp
        for ahead in (options.prefetch if name == OURS else (None,))
        for update in (options.update if name == OURS else ("after-backward",))
        for gather_by in (options.gather_by if name == OURS else ("collectives",))
    ]
    cells = training_cells(FullyShardedCell, options, inner=sides)
    if options.memory_budget_gib is not None and (
        options.keep is not None or not any(cell.written_out for cell in cells)
    ):
        raise ValueError("--memory-budget-gib chooses what blocks of --kernels fused keep, without --keep")
    policies = [canonical_policy(policy) for policy in options.peer_checkpoint]
    turns = in_turns(cells, lambda cell: [replace(cell, **_PEER, checkpoint=policy) for policy in policies])
    if "on" in {cell.do_bench for cell in turns} and options.device != "cuda":
        raise ValueError(f"--do-bench on: triton's do_bench times CUDA devices, got --device {options.device}")
    ours = (lambda cell: "step", lambda cell: cell.fsdp == OURS and cell.written_out)
    return within_budget(turns, options.memory_budget_gib, *ours, mixed=True)


def stages(options: Any, cells: Sequence[FullyShardedCell], outcomes: list[Outcome]) -> list[Stage]:
    """All cells by one measurement."""
    from cs336_systems.experiments.fully_sharded_measure import measure

    return list(with_effort(measure)(options, cells, outcomes))


_WORK = ("gpu", "device", "size", "dtype", "batch_size", "accumulate", "context_length", "world_size")
"""Settings in which the fastest ways to do the same work agree."""

_OURS_ALONE = ("fsdp", "prefetch", "update", "gather_by", "do_bench", "losses")
"""Settings that only ours can be asked."""


def _over_fsdp2(line: Line) -> Spread | None:
    """The step's ratio to that of torch's implementation: under the same settings, or else of its fastest."""
    if line.settings["fsdp"] == TORCH:
        return None
    twins = _twins(line, TORCH)
    return line.repeats_over("step", twins[0] if twins else _fastest(line, TORCH))


def _over_ours(line: Line) -> Spread | None:
    """How many times as long torch's implementation takes as the fastest of ours, where none has its settings."""
    if line.settings["fsdp"] != TORCH or _twins(line, "ours"):
        return None
    return line.repeats_over("step", _fastest(line, "ours"))


def _twins(line: Line, implementation: str) -> list[Line]:
    """The lines of an implementation that differ in nothing else, but for what only ours can be asked."""
    shared = {name: value for name, value in line.settings.items() if name not in _OURS_ALONE}
    return [
        other for other in line.lines.values() if other.settings.items() >= (shared | {"fsdp": implementation}).items()
    ]


def _fastest(line: Line, implementation: str) -> Line | None:
    """The fastest line of an implementation at the same work."""
    work = {name: value for name, value in line.settings.items() if name in _WORK}
    found = [
        other
        for other in line.lines.values()
        if other.settings.items() >= (work | {"fsdp": implementation}).items() and "step" in other.metrics
    ]
    return min(found, key=lambda other: float(other.metrics["step"]["median"]), default=None)


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
        Column("/ FSDP2", _over_fsdp2, ".3f", rank=0, note="median step over FSDP2's, by repeat"),
        Column(
            "/ ours",
            _over_ours,
            ".3f",
            optional=True,
            note="FSDP2's median step over that of the fastest of ours, by repeat",
        ),
        Column("do_bench ms", "do_bench", rank=2, optional=True, note="the step by triton.testing.do_bench"),
        Column(
            "loss off %",
            "loss_error",
            ".3f",
            optional=True,
            note="from the reference's in fp32, on one batch from the same weights, the most of any step",
        ),
        Column("forward ms", "forward", rank=2),
        Column("backward ms", "backward", rank=2),
        Column("optimizer ms", "optimizer", rank=2),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("scaling %", scaling, ".1f", optional=True, note=SCALING),
        Column("parameters GiB", "parameters", rank=3),
        Column("gradients GiB", "gradients", rank=3),
        Column("optimizer GiB", "optimizer_state", rank=3),
        Column("states to predicted %", "state_error", "+.2f", rank=2, note="of the fullest rank"),
        Column("peak GiB", "peak_memory"),
        Column("requested GiB", "peak_requested", ".3f", rank=2, optional=True, note="before the allocator rounds up"),
        Column("predicted GiB", "predicted_peak", rank=2, optional=True, note="the peak"),
        Column("MHz", "sm_mhz", ".0f", rank=2, optional=True, note="clock of rank 0's GPU in the timed steps"),
        Column("W", "power_w", ".0f", rank=2, optional=True, note="its power"),
        Column("collectives", "collectives", ".0f", rank=3),
        Column("sent MiB", sent_mib, rank=2, note=SENT),
        Column("predicted MiB", "predicted_sent", rank=3),
        Column("gathers", "gathers", ".0f", rank=3),
        Column("late", "late_gathers", ".0f", rank=2, note="gathers waited for"),
        Column("waited ms", "gather_wait", ".3f", spread=True, rank=2, note="for all gathers of a step"),
        Column("hidden %", "hidden_share", ".1f", rank=2, optional=True, note="communication beside other kernels"),
        Column("communication alone ms", "waited", ".2f", rank=2, optional=True, note="on rank 0"),
        Column("exposed ms", "exposed", ".2f", rank=2, optional=True, note="the same on the rank where it is least"),
    ),
)
"""One line per cell: step times, states and peak, communication and waits for weights."""


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
    """Shows the table; of recorded steps also where their time goes, and a picture of that beside the recordings."""
    with_earlier_rows(FULLY_SHARDED.of)(outcomes, options, csv)
    if options.trace is not None:
        from cs336_systems.experiments.fully_sharded_breakdown import breakdown_figure, breakdown_table, recorded_lines
        from cs336_systems.harness.sweep import outcome_rows
        from cs336_systems.report.figures import save
        from cs336_systems.report.show import show

        rows = outcome_rows(outcomes)
        for line in recorded_lines(rows):
            show(breakdown_table(line), options.format)
        save(breakdown_figure(rows), options.trace / "breakdown.png")


EXPERIMENT = Experiment(
    "benchmark_fsdp",
    FullyShardedCell,
    make_cells,
    stages,
    present,
    (
        *("step", "tokens_per_s", "parameters", "gradients", "optimizer_state", "state_error", "peak_memory"),
        *("sent_per_rank", "gathers", "late_gathers", "gather_wait", "hidden_share"),
    ),
    options=Options,
)
