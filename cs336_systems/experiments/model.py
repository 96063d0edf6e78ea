"""What does a training step of a model cost on this machine? Forward, backward and optimizer, prediction and limits.

Parameters, tokens and targets are random. The ceilings of the machine (a matmul, a copy) are measured first, in the
same run; then each cell, one step in one mode, whose peak memory is predicted: a cell that cannot fit is reported, not
run. Which operations a rate counts, and of which limit it is a share, stands in its unit; ``costs/flops.py`` has the
conventions. ``model_measure.py`` runs a cell.
"""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.case import RECIPE, TrainingCase
from cs336_systems.config import MODES
from cs336_systems.costs.checkpointing import KEEP_MATMULS
from cs336_systems.declared import flag, like, names_in, option, options_in, options_of
from cs336_systems.experiments.driver import Experiment, Stage, measured_by, presented
from cs336_systems.experiments.options import Compile, TimedCase, TrainingRun, in_turns, training_cells
from cs336_systems.hardware import GIB
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread
from cs336_systems.report.tables import Table, settings_split

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from cs336_systems.harness.sweep import Outcome
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
    memory_budget_gib: float | None = option(
        None,
        "Choose what each cell keeps for backward: what recomputes least among all whose predicted peak fits.",
        sign="positive",
    )
    compare: Path | None = None
    """CSV of an earlier run: also print the ratio of each time to that run's, with a verdict."""
    force: bool = False
    """Also run cells that are predicted not to fit."""


Options: Any = options_of(ModelCell, Asked)

_PEER = {name: getattr(TrainingCase, name) for name in ("kernels", "keep", "checkpoint", "master", "offload", *RECIPE)}
"""The reference model, whose backward is autograd's."""


def make_cells(options: Any) -> list[ModelCell]:
    """The grid, interleaved with its peers; under a memory budget only the settings that fit, reported on stderr.

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
    return turns if options.memory_budget_gib is None else _within_budget(turns, options.memory_budget_gib)


def _within_budget(cells: Sequence[ModelCell], budget_gib: float) -> list[ModelCell]:
    """The cells with the least recomputation within the budget; the choices are reported on stderr.

    Raises:
        ValueError: nothing fits the budget.
    """
    from cs336_systems.costs.planner import cheapest_keep, cheapest_policy
    from cs336_systems.harness.memory import is_predictable, predicted_peak
    from cs336_systems.training.activation_checkpointing import unsupported_reason

    def chosen(cell: ModelCell) -> tuple[ModelCell, str]:
        def peak(case: Any) -> Any:
            """The predicted peak, of autograd with eager reference attention, which other attentions stay below."""
            eager = {} if case.written_out else {"attention": "reference", "compile": "off"}
            return predicted_peak(replace(case, **eager), mode=cell.mode)

        if cell.written_out:
            found = cheapest_keep(cell, cell.mode, int(budget_gib * GIB), peak)
            return replace(cell, keep=found.choice), f"keep {found}"
        selective = unsupported_reason(KEEP_MATMULS, cell.attention) is None
        found = cheapest_policy(cell, cell.mode, int(budget_gib * GIB), peak, selective=selective)
        limit = "" if is_predictable(cell) else " (the peak of eager reference attention: this should need less)"
        return replace(cell, checkpoint=found.choice), f"{found}{limit}"

    fitted, notes = [], []
    for cell in cells:
        fitting, found = chosen(cell)
        fitted.append(fitting)
        what = str(cell).replace(f" keep {cell.keep}", "", 1)
        notes.append(f"{what} within {budget_gib:g} GiB, least recomputation: {found}")
    print(*dict.fromkeys(notes), sep="\n", file=sys.stderr)
    return fitted


def ceiling_cells(options: Any) -> list[CeilingCell]:
    """One for each dtype of the grid; what does not apply is empty in its row."""
    blank: dict[str, Any] = {each.name: "" if isinstance(each.default, str) else 0 for each, _ in options_in(ModelCell)}
    return [
        CeilingCell(**blank | {"device": options.device, "dtype": dtype, "seed": options.seed})
        for dtype in dict.fromkeys(options.dtype)
    ]


def stages(options: Any, cells: Sequence[ModelCell], outcomes: list[Outcome]) -> Iterator[Stage]:
    """The ceilings of every dtype; then the cells, which stand beside them."""
    yield Stage(ceiling_cells(options), measured_by("model_measure", "measure_ceiling"))
    found = {outcome.cell.dtype: outcome.median("matmul_ceiling") for outcome in outcomes}
    ceilings = {dtype: tflops for dtype, tflops in found.items() if tflops is not None}
    yield Stage(
        cells, functools.partial(measured_by("model_measure", "measure_model"), ceilings=ceilings, force=options.force)
    )


SETTINGS = (
    "device",
    *names_in(ModelCell, last=("master", "offload", "accumulate", "cuda_graph", "mode", "warmup", "steps")),
)
"""Columns that tell one cell of a model benchmark from another."""


def _over_compiled(line: Line) -> Spread | None:
    """The step's ratio to that of the compiled reference model, per repeat, for hand-written blocks."""
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
        Column("total ms", "step", spread=True, rank=MAIN),
        Column(
            *("/ compiled", _over_compiled, ".3f"),
            optional=True,
            note="total / the compiled reference model's; median and range over repeats",
        ),
        Column("tokens/s", "tokens_per_s"),
        Column("TFLOP/s", "model_tflops", rank=3),
        Column("MFU %", "mfu", ".1f"),
        Column(
            "light %",
            "light",
            ".1f",
            rank=2,
            note="time of the matmuls at their dtypes' peaks / step time",
            optional=True,
        ),
        Column("% of ceiling", "matmul_ceiling_share", ".1f", rank=2),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak_memory", rank=2),
    ),
)


def step_table(rows: pd.DataFrame) -> Table:
    """One line per cell, without the ceilings."""
    return STEPS.of(rows[rows["variant"] != CEILING])


_SHARES = {
    "mfu": "MFU: % of the dtype's datasheet peak\n(model FLOPs, causal)",
    "matmul_ceiling_share": "% of the measured matmul ceiling\n(model FLOPs, causal)",
}
_MOST_PANELS = 3
_NAMED = ["gpu", *(name for name in SETTINGS if name not in ("device", "warmup", "steps"))]
"""Settings that titles and legends name."""


def _measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each cell in the largest mode."""
    from cs336_systems.harness.runs import newest

    rows = rows[rows["variant"] != CEILING]
    rows = rows[rows["mode"] == max(rows["mode"].unique(), key=MODES.index)] if len(rows) else rows
    return newest(rows, ["gpu", *SETTINGS])


def step_figure(rows: pd.DataFrame) -> Figure | None:
    """Time of the whole pass (left) and share of the limit (right) against context length, or against model size if
    only one length was measured.

    Of rows in several modes the largest is drawn. Colour is the model, or the setting where the sizes are the axis;
    markers and dashes are the settings that differ.
    """
    from cs336_systems.report.figures import lines

    rows = _measured(rows)
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return None
    x = "context_length" if rows["context_length"].nunique() > 1 else "size"
    caption, varying = settings_split(rows, _NAMED, ())
    differing = [name for name in varying if name not in (x, "size")]
    rows = rows.assign(how=rows[differing].astype(str).agg(", ".join, axis=1) if differing else rows["dtype"])
    share = next((metric for metric in _SHARES if (rows["metric"] == metric).any()), "")
    rows = rows[rows["metric"].isin(("step", share))]
    looks: dict[str, str] = {"colour": "how", "log": "y"}
    if x == "context_length":
        rows, looks = rows.sort_values(x, kind="stable"), {"colour": "size", "style": "how", "log": "xy"}
    figure, axes = lines(rows, x=x, panel="metric", spread=True, width=4.4, height=3.6, **looks)  # type: ignore[arg-type]
    axes["step"].set_ylabel("time of the whole pass, ms\n(median, bar p10 to p90)")
    if share:
        axes[share].set_yscale("linear")
        axes[share].set_ylim(bottom=0)
        axes[share].set_ylabel(_SHARES[share])
    figure.supxlabel("context length, tokens" if x == "context_length" else "model size", fontsize=10)
    figure.suptitle(caption, fontsize=9)
    return figure


def frontier_figure(rows: pd.DataFrame) -> Figure | None:
    """Peak GiB against ms of the whole pass, a named point for every policy of checkpointing that ran; an open marker
    is the predicted peak.

    A panel for each of the three models and settings with the most policies, in the largest mode.
    """
    from cs336_systems.report.figures import OKABE_ITO, panels

    rows = _measured(rows)
    settings = [name for name in _NAMED if name != "checkpoint"]
    groups = []
    for _, group in rows[rows["metric"] != ""].groupby(settings, sort=False, dropna=False):
        table = group.pivot_table(index="checkpoint", columns="metric", values="median", sort=False)
        points = table.reindex(columns=["step", "peak_memory", "predicted_peak_memory"])
        groups.append((group, points.dropna(subset=["step", "peak_memory"])))
    groups = sorted((pair for pair in groups if len(pair[1]) > 1), key=lambda pair: -len(pair[1]))[:_MOST_PANELS]
    if not groups:
        return None
    figure, shown = panels(len(groups), _MOST_PANELS, 6, 4.4)
    for axes, (group, points) in zip(shown, groups, strict=True):
        axes.plot(points["step"], points["peak_memory"], "o", color=OKABE_ITO[0], label="measured")
        axes.plot(points["step"], points["predicted_peak_memory"], "o", color="grey", mfc="white", label="predicted")
        for i, (policy, point) in enumerate(points.sort_values("step").iterrows()):
            place: dict[str, Any] = {"xytext": (-7, -3), "ha": "right"} if i % 2 else {"xytext": (7, -3)}
            at = point["step"], point["peak_memory"]
            axes.annotate(str(policy), at, textcoords="offset points", fontsize=8, **place)
        axes.set_ylim(0, 1.08 * points[["peak_memory", "predicted_peak_memory"]].max().max())
        axes.margins(x=0.2)
        axes.set_xlabel("time of the whole pass, ms (median)")
        axes.set_ylabel("peak memory, GiB")
        axes.set_title(textwrap.fill(settings_split(group, settings, ())[0], 80), fontsize=8)
    shown[0].legend(frameon=False, fontsize=9)
    return figure


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
    """The table, the comparison if it is asked for, and the figures of all rows of the file."""
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
    return ["cs336_systems.training", *(["torch._dynamo"] if dynamo else [])]


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
