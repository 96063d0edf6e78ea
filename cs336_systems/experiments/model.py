"""What does a training step of a model cost on this machine? Forward, backward and optimizer, prediction and limits.

Parameters, tokens and targets are random. The ceilings of the machine (a matmul, a copy) are measured first, in the
same run; then each cell, one step in one mode (``model_measure.py``), whose peak memory is predicted: a cell that
cannot fit is reported, not run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.case import RECIPE, TrainingCase
from cs336_systems.config import MODES
from cs336_systems.declared import flag, like, names_in, option, options_in, options_of
from cs336_systems.experiments.driver import Experiment, Stage, presented
from cs336_systems.experiments.options import Compile, TimedCase, TrainingRun, in_turns, training_cells, within_budget
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

if TYPE_CHECKING:
    import pandas as pd

    from cs336_systems.harness.sweep import Outcome
    from cs336_systems.report.tables import Table

CEILING = "ceiling"
"""Variant of the rows that hold the ceilings measured in the same run."""


@dataclass(frozen=True)
class ModelCell(TimedCase):
    """One step in one mode; the fields are columns."""

    warmup: int = like(TimedCase, "warmup", several=True)
    mode: str = option(
        "step",
        "forward: without gradients; backward: forward and backward; step: forward, backward and optimizer.",
        values=MODES,
        asked=MODES,
    )

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


@dataclass(frozen=True)
class Asked(TrainingRun):
    """What does a training step of this model cost on this machine?"""

    CPU_DEFAULTS: ClassVar = {"context_length": (128,), "batch_size": (1,), "warmup": (1,), "steps": 3}
    peer_compile: tuple[Compile, ...] = ()
    """Also measure the reference model beside every cell, with torch.compile off, on or whole-model."""
    memory_budget_gib: float | None = None
    """Choose what each cell keeps for backward: what recomputes least among all whose predicted peak fits."""
    compare: Path | None = None
    """CSV of an earlier run: also print the ratio of each time to that run's, with a verdict."""
    force: bool = False
    """Also run cells that are predicted not to fit."""


Options: Any = options_of(ModelCell, Asked)

_PEER = {name: getattr(TrainingCase, name) for name in ("kernels", "keep", "checkpoint", "master", "offload", *RECIPE)}
"""The reference model, whose backward is autograd's."""


def make_cells(options: Any) -> list[ModelCell]:
    """The grid, in turns with its peers; under a memory budget with what fits it, which is told on stderr.

    Raises:
        ValueError: a value that no cell can have, a budget that nothing fits, or rows that are none to compare with.
        OSError: those rows cannot be read.
    """
    if options.memory_budget_gib is not None:
        served: dict[str, Any] = {"checkpoint": ("none",), "keep": None, "accumulate": (1,)}
        served |= {"scaling": ("tensor",)} if "e4m3" in options.matmul_dtype else {}
        for name, value in served.items():
            if (given := getattr(options, name)) != value:
                shown = " ".join(map(str, given))
                raise ValueError(f"--memory-budget-gib chooses what is kept of plain steps, got {flag(name)} {shown}")
    if "on" in options.cuda_graph and options.mode != ("step",):
        raise ValueError(f"--cuda-graph on captures whole steps, --mode step, got --mode {' '.join(options.mode)}")
    if options.compare is not None:
        from cs336_systems.harness.record import read_rows
        from cs336_systems.harness.sweep import cell_columns

        read_rows(options.compare, cell_columns(ModelCell))

    def peers(cell: ModelCell) -> list[ModelCell]:
        return [replace(cell, **_PEER, compile=how) for how in options.peer_compile]

    turns = in_turns(training_cells(ModelCell, options), peers)
    return within_budget(turns, options.memory_budget_gib, lambda cell: cell.mode, lambda cell: True)


def ceiling_cells(options: Any) -> list[CeilingCell]:
    """One for each dtype of the grid; what does not apply is empty in its row."""
    blank: dict[str, Any] = {each.name: "" if isinstance(each.default, str) else 0 for each, _ in options_in(ModelCell)}
    return [
        CeilingCell(**blank | {"device": options.device, "dtype": dtype, "seed": options.seed})
        for dtype in dict.fromkeys(options.dtype)
    ]


def stages(options: Any, cells: Sequence[ModelCell], outcomes: list[Outcome]) -> Iterator[Stage]:
    """The ceilings of every dtype; then the cells, which stand beside them."""
    from cs336_systems.experiments import model_measure

    yield Stage(ceiling_cells(options), model_measure.measure_ceiling)
    found = {outcome.cell.dtype: outcome.median("matmul_ceiling") for outcome in outcomes}
    ceilings = {dtype: tflops for dtype, tflops in found.items() if tflops is not None}
    yield Stage(cells, functools.partial(model_measure.measure_model, ceilings=ceilings, force=options.force))


SETTINGS = (
    "device",
    *names_in(ModelCell, last=("master", "offload", "accumulate", "cuda_graph", "mode", "warmup", "steps")),
)
"""Columns that tell one cell of a model benchmark from another."""


def _over_compiled(line: Line) -> Spread | None:
    """The step's ratio to that of the compiled reference model, turn by turn, where blocks are written out."""
    if line.settings.get("keep", "autograd") == "autograd":
        return None
    reference = {name: getattr(TrainingCase, name) for name in ("kernels", "keep", *RECIPE) if name in line.settings}
    return line.repeats_over("step", line.peer(**reference, compile="on"))


STEPS = ResultTable(
    settings=("gpu", *SETTINGS),
    columns=(
        Column("forward ms", "forward", spread=True),
        Column("backward ms", "backward", spread=True),
        Column("optimizer ms", "optimizer", spread=True),
        Column(
            "total ms",
            "step",
            spread=True,
            rank=MAIN,
            note="in each step the phases add up to it; their medians need not",
        ),
        Column(
            *("/ compiled", _over_compiled, ".3f"),
            optional=True,
            note="total over the compiled reference model's, of several turns median and range",
        ),
        Column("tokens/s", "tokens_per_s"),
        Column("TFLOP/s", "model_tflops", rank=3),
        Column("MFU %", "mfu", ".1f"),
        Column("light %", "light", ".1f", rank=2, note="of products at their dtypes' peaks", optional=True),
        Column("% of ceiling", "matmul_ceiling_share", ".1f", rank=2),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak_memory", rank=2),
    ),
)


def step_table(rows: pd.DataFrame) -> Table:
    """One line per cell, without the ceilings."""
    return STEPS.of(rows[rows["variant"] != CEILING])


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
    """The table, the comparison if it is asked for, and the figures of all rows of the file."""
    from cs336_systems.experiments.model_figures import frontier_figure, step_figure
    from cs336_systems.harness.record import read_rows
    from cs336_systems.report.compare import compare

    def tables(rows: pd.DataFrame) -> Iterator[Table]:
        if not (rows["variant"] != CEILING).any():
            return
        yield step_table(rows)
        if options.compare is not None:
            before = read_rows(options.compare)
            appended = len(rows) if csv and csv.samefile(options.compare) else 0
            yield compare(rows, before.head(len(before) - appended))

    presented(tables, {"": step_figure, "_frontier": frontier_figure})(outcomes, options, csv)


def _preloaded(options: Any) -> list[str]:
    """The bare command does without dynamo, whose import takes seconds."""
    dynamo = "torch-fused" in options.optimizer or options.compile != ("off",)
    return ["cs336_systems.experiments.model_measure", *(["torch._dynamo"] if dynamo else [])]


EXPERIMENT = Experiment(
    "benchmark_model",
    ModelCell,
    make_cells,
    stages,
    present,
    (
        *("matmul_ceiling", "copy_ceiling", "forward", "backward", "optimizer", "step"),
        *("tokens_per_s", "mfu", "peak_memory"),
    ),
    options=Options,
    measured=lambda cell: not isinstance(cell, CeilingCell),
    preloaded=_preloaded,
)
