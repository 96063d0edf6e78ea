"""Options of ``benchmark_model.py``, and its grid. Imports no torch."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from cs336_systems.case import TrainingCase
from cs336_systems.experiments.options import (
    MODES,
    RECIPE,
    Compile,
    Dtype,
    Mode,
    TimedCase,
    TrainingOptions,
    training_cells,
)

CEILING = "ceiling"
"""Variant of the rows that hold the ceilings measured in the same run."""


@dataclass(frozen=True)
class Options(TrainingOptions):
    """What does a training step of this model cost on this machine?"""

    CPU_DEFAULTS: ClassVar = {"context_length": (128,), "batch_size": (1,), "warmup": (1,), "steps": 3}
    dtype: tuple[Dtype, ...] = ("fp32",)
    warmup: tuple[int, ...] = (5,)
    mode: tuple[Mode, ...] = MODES
    """forward: without gradients; backward: forward and backward; step: forward, backward and optimizer."""
    peer_compile: tuple[Compile, ...] = ()
    """Compile modes of the reference model, measured in turns with every cell: off, on, whole-model."""
    memory_budget_gib: float | None = None
    """Choose each cell's checkpointing, or with --kernels fused what blocks keep: the least recomputation whose
    predicted peak fits."""
    compare: Path | None = None
    """CSV of an earlier run: print ratios to it, with a verdict."""
    force: bool = False
    """Run cells that are predicted not to fit."""


@dataclass(frozen=True)
class ModelCell(TimedCase):
    """One step in one mode; the fields are columns."""

    mode: str = "step"

    @property
    def variant(self) -> str:
        return "compiled" if self.compiled else "eager"

    def __str__(self) -> str:
        return " ".join([self.shape_words, self.mode, *self.extras])


@dataclass(frozen=True)
class CeilingCell(ModelCell):
    """The machine's own limits for one dtype, measured before the cells that stand beside them."""

    @property
    def variant(self) -> str:
        return CEILING

    def __str__(self) -> str:
        return f"ceilings of this machine in {self.dtype}"


_PEER = {name: getattr(TrainingCase, name) for name in ("kernels", "keep", "checkpoint", "master", "offload", *RECIPE)}
"""The reference model, whose backward is autograd's."""


def make_cells(options: Options) -> list[ModelCell]:
    """The grid; raises ValueError for a value that no cell can have."""
    if (budget := options.memory_budget_gib) is not None:
        if options.checkpoint != ("none",):
            chosen = " ".join(options.checkpoint)
            raise ValueError(f"--memory-budget-gib chooses the policy itself, got --checkpoint {chosen}")
        if options.keep is not None:
            raise ValueError(f"--memory-budget-gib chooses what to keep itself, got --keep {' '.join(options.keep)}")
        if not 0 < budget < math.inf:
            raise ValueError(f"--memory-budget-gib must be positive and finite, got {budget:g}")
        if options.accumulate != (1,):
            given = " ".join(map(str, options.accumulate))
            raise ValueError(f"--memory-budget-gib plans for steps of one micro-batch, got --accumulate {given}")
        if "e4m3" in options.matmul_dtype and options.scaling != ("tensor",):
            given = f"--scaling {' '.join(options.scaling)}"
            raise ValueError(f"--memory-budget-gib plans for quantized products with --scaling tensor, got {given}")
    if "on" in options.cuda_graph and options.mode != ("step",):
        raise ValueError(f"--cuda-graph on captures whole steps, --mode step, got --mode {' '.join(options.mode)}")
    own = [{"mode": mode, "warmup": warmup} for mode in options.mode for warmup in options.warmup]
    cells = training_cells(ModelCell, options, inner=own)
    turns = []
    for repeat in range(options.repeat):
        turn = [cell for cell in cells if cell.repeat == repeat]
        peers = dict.fromkeys(replace(cell, **_PEER, compile=how) for cell in turn for how in options.peer_compile)
        turns += [*turn, *peers] if repeat % 2 == 0 else [*reversed(peers), *turn]
    return turns


def ceiling_cells(options: Options) -> list[CeilingCell]:
    """One for each dtype of the grid; what does not apply is empty in its row."""
    blank = {"batch_size": 0, "context_length": 0, "attention": "", "compile": "", "checkpoint": "", "optimizer": ""}
    blank |= {"accumulate": 0, "cuda_graph": ""}
    blank |= {"kernels": "", "keep": "", "master": "", "offload": ""}
    blank |= {"matmul_dtype": "", "gradient_dtype": "", "scaling": ""}
    return [
        CeilingCell(device=options.device, size="", dtype=dtype, seed=options.seed, warmup=0, steps=0, mode="", **blank)  # type: ignore[arg-type]
        for dtype in dict.fromkeys(options.dtype)
    ]
