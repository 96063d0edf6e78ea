"""Options of ``benchmark_fsdp.py``, and its grid; the implementations of one model follow each other. No torch."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cs336_systems.case import RECIPE, GatherBy, Parallel, TrainingCase
from cs336_systems.config import PRECISIONS, Precision
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.declared import like
from cs336_systems.experiments.options import RankedCase, RankedOptions, RankedRun, Switch, flag, training_cells

Implementation = Literal["ours", "torch", "ddp"]
OURS, TORCH, DDP = get_args(Implementation)
BF16_COMPUTE = "bf16-compute"

_WRAPPERS = {OURS: "fsdp", TORCH: "fsdp2", DDP: "bucketed"}


@dataclass(frozen=True)
class Options(RankedOptions):
    """What does full sharding save, and what does it cost?"""

    CPU_DEFAULTS = RankedRun.CPU_DEFAULTS | {"warmup": 2, "steps": 5}
    size: tuple[str, ...] = ("xl",)
    dtype: tuple[Literal["fp32", "bf16-compute", "bf16"], ...] = ("fp32",)
    """fp32; bf16-compute: fp32 master weights, bf16 weights gathered for computing, fp32 reductions (ddp: autocast); or
    bf16: weights, gradients, their reductions and moments."""
    fsdp: tuple[Implementation, ...] = get_args(Implementation)
    """ours: this suite's; torch: fully_shard of every block; ddp: this suite's bucketed data parallelism, where it
    fits."""
    prefetch: tuple[int, ...] = (1,)
    """How many units ahead ours gathers weights."""
    update: tuple[Literal["after-backward", "under-backward"], ...] = ("after-backward",)
    """When the optimizer of ours runs: after backward, or for each unit as soon as its gradients are reduced."""
    gather_by: tuple[GatherBy, ...] = ("collectives",)
    """How weights of ours come together: in collectives, or by copies from the other ranks' memory, on one host."""
    peer_checkpoint: tuple[str, ...] = ()
    """Checkpointing policies for FSDP2, measured in turns with every cell at its fastest: compiled, with cuDNN's
    attention and torch's fused AdamW."""
    memory_budget_gib: float | None = None
    """Choose what the written-out blocks of ours keep: the least recomputation whose predicted peak fits; the first
    blocks may keep more than the rest."""
    do_bench: Switch = "off"
    """on: also time the whole step by triton.testing.do_bench, for twice the warm-up and eleven more steps."""
    losses: int = 0
    """Steps on one batch, run first, whose losses are compared with those of the reference in fp32."""
    trace: Path | None = None
    """Folder for a recording (torch.profiler) and a picture of rank 0 per cell, in the first turn."""
    recorded: tuple[Implementation, ...] = ()
    """Implementations that --trace records; by default all."""


@dataclass(frozen=True)
class FullyShardedCell(RankedCase):
    """One implementation on one model; the fields are columns, sizes are per rank."""

    dtype: str = like(TrainingCase, "dtype", values=("fp32", "bf16-compute", "bf16"))
    fsdp: str = OURS
    prefetch: int | None = None
    """Of ours, else None."""
    update: str = "after-backward"
    gather_by: GatherBy = "collectives"
    do_bench: str = "off"
    losses: int = 0

    @property
    def variant(self) -> str:
        return self.fsdp

    @property
    def precision(self) -> Precision:
        """Of the step itself: FSDP casts weights on its own, DDP leaves that to autocast."""
        if self.dtype == BF16_COMPUTE:
            return PRECISIONS["autocast-bf16" if self.fsdp == DDP else "fp32"]
        return PRECISIONS[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Per element of a gathered weight."""
        return 2 if self.dtype == BF16_COMPUTE else self.precision.parameter_bytes

    @property
    def parallel(self) -> Parallel:
        compute_dtype = "bf16" if self.dtype == BF16_COMPUTE else "same"
        prefetch = 1 if self.prefetch is None else self.prefetch
        return Parallel(
            _WRAPPERS[self.fsdp],
            compute_dtype=compute_dtype,
            prefetch=prefetch,
            update=self.update,
            gather_by=self.gather_by,
        )

    @property
    def name(self) -> str:
        """In file names."""
        compiled = "-compiled" if self.compiled else f"-{self.kernels}-keep-{self.keep}" if self.written_out else ""
        several = f"-{self.accumulate}x" if self.accumulate != 1 else ""
        ahead = "" if self.prefetch is None else f"-ahead{self.prefetch}"
        under = "" if self.update == "after-backward" else f"-{self.update}"
        copies = "-copies" if self.gather_by == "copies" else ""
        return (
            f"{self.size}-{self.dtype}-{self.checkpoint}{compiled}{several}-{self.fsdp}{ahead}{under}{copies}"
            f"-{self.world_size}ranks-{self.repeat}"
        )

    def __str__(self) -> str:
        ahead = "" if self.prefetch is None else f" {self.prefetch} ahead"
        under = "" if self.update == "after-backward" else f" updated {self.update.replace('-', ' ')}"
        copies = " by copies" if self.gather_by == "copies" else ""
        return f"{self.fsdp}{ahead}{under}{copies} on {self.world_size} ranks: {super().__str__()}"


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
"""FSDP2 where it is as fast as it can be."""


def make_cells(options: Options) -> list[FullyShardedCell]:
    """The grid; raises ValueError for a value that no cell can have."""
    for name in ("prefetch", "update", "gather_by"):
        if OURS not in options.fsdp and getattr(options, name) != getattr(Options, name):
            raise ValueError(f"{flag(name)} is of --fsdp {OURS}, which is not among {', '.join(options.fsdp)}")
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
    if (budget := options.memory_budget_gib) is not None and not 0 < budget < math.inf:
        raise ValueError(f"--memory-budget-gib must be positive and finite, got {budget:g}")
    if budget is not None and (options.keep is not None or not any(cell.written_out for cell in cells)):
        raise ValueError("--memory-budget-gib chooses what blocks of --kernels fused keep, without --keep")
    policies = [canonical_policy(policy) for policy in options.peer_checkpoint]
    turns = []
    for repeat in range(options.repeat):
        turn = [cell for cell in cells if cell.repeat == repeat]
        peers = dict.fromkeys(replace(cell, **_PEER, checkpoint=policy) for cell in turn for policy in policies)
        turns += [*turn, *peers] if repeat % 2 == 0 else [*reversed(peers), *turn]
    if "on" in {cell.do_bench for cell in turns} and options.device != "cuda":
        raise ValueError(f"--do-bench on: triton's do_bench times CUDA devices, got --device {options.device}")
    return turns
