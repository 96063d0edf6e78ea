"""Runs a benchmark: checks options, measures each cell, shows results, ends with a line of JSON and an exit code.

A benchmark is one file, ``experiments/NAME.py``, in this order:

1. Its docstring: what is asked, how it is measured, and the limits of the answer.
2. Its ``Cell``: a frozen dataclass whose fields are columns. A training step's cell inherits ``TimedCase`` or
   ``RankedCase``; fields made by ``option`` (``declared.py``) are options of the command, several values of each.
3. ``Options = options_of(Cell, RunOptions, cpu={...})`` (or ``PeerRun``, ``TrainingRun``, ``RankedRun``, or a subclass
   with options that are no columns), with the smaller defaults of a CPU.
4. ``make_cells(options)``: the grid, by ``every`` or ``training_cells``; ValueError, one sentence with the option and
   its value, for an invalid cell.
5. ``measure(cell)``, or ``measure(cell, rank)`` for cells with a ``world_size``: a list of ``Metric``; or the name of
   a module beside it that has one, ``measured_by("kernel_measure")``.
6. Its table (``report.results.ResultTable``) and figures, functions of rows.
7. ``EXPERIMENT = Experiment(...)``; the command is ``main = command(EXPERIMENT, __doc__)``.

Importing a benchmark imports no torch, pandas or matplotlib, so that ``--help`` is answered at once. The same course
runs on one process, on ranks that it starts and under torchrun, where rank 0 alone presents. The exit code is 1, with
the reason, if nothing was measured or a cell failed. Cells that are out of memory or unsupported are no failures as
long as something was measured.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.config import PRECISIONS, Recipe
from cs336_systems.experiments.options import check_options, small_defaults_note
from cs336_systems.processes import start_server
from cs336_systems.report.command_line import INTERRUPTED, complain, os_error, parse
from cs336_systems.report.tables import Table, show

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from cs336_systems.experiments.options import RunOptions
    from cs336_systems.harness.isolation import Cell
    from cs336_systems.harness.record import RowFile
    from cs336_systems.harness.sweep import Outcome

_MOST_CELLS = 8
"""Cells in the line of JSON; the rows on disk hold all."""

PRELOADED = ("cs336_systems.training", "torch._dynamo")
"""Modules that the process server imports while the command does; the constructor of a torch optimizer needs dynamo."""


@dataclass(frozen=True)
class Stage:
    """Cells that are measured in one way."""

    cells: Sequence[Cell]
    measure: Callable[..., Any]
    """A module-level function or a partial of one: (cell), or for cells of several ranks (cell, rank), -> metrics."""
    share: Callable[[Any], Hashable] | None = None
    """Successive cells with equal values share a process."""


Stages = Callable[[Any, Sequence[Any], "list[Outcome]"], Iterable[Stage]]
"""(options, cells, outcomes so far) -> stages, asked for the next one when the one before has ended."""


def one_stage(measure: Callable[..., Any], share: Callable[[Any], Hashable] | None = None) -> Stages:
    """All cells by one function."""
    return lambda options, cells, outcomes: [Stage(cells, measure, share)]


def measured_by(module: str, function: str = "measure") -> Callable[..., Any]:
    """A function of a module of this folder, imported when called: it needs torch, which benchmarks must not import."""
    return functools.partial(_call, f"{__package__}.{module}", function)


def _call(module: str, function: str, *arguments: Any, **keywords: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments, **keywords)


Present = Callable[["list[Outcome]", Any, Path | None], int | None]
"""(outcomes, options, file of rows) -> the exit code, if it is not 0 or None."""


def presented(
    tables: Callable[[pd.DataFrame], Table | Iterable[Table]],
    figures: Mapping[str, Callable[[pd.DataFrame], Figure | None]] | None = None,
    *,
    earlier: bool = False,
) -> Present:
    """Shows the tables of the rows of this run, and draws the figures of all rows of the file beside it.

    Args:
        figures: by what is added to the file's stem: ``{"": step_figure, "_frontier": frontier_figure}``.
        earlier: whether the tables hold all rows of the file.
    """

    def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> None:
        from cs336_systems.harness.record import read_rows
        from cs336_systems.harness.sweep import outcome_rows
        from cs336_systems.report.figures import save

        rows, budget = outcome_rows(outcomes), getattr(options, "memory_budget_gib", None)
        peaks, notes = rows.loc[rows["metric"] == "peak_memory", "median"], {}
        if budget is not None and (over := int((peaks > budget).sum())):
            notes = {"peak GiB": f"{over} of {len(peaks)} above the budget of {budget:g}, which the prediction kept"}
        every = read_rows(csv) if csv and (earlier or figures) else rows
        made = tables(every if earlier else rows)
        for table in [made] if isinstance(made, Table) else made:
            show(replace(table, notes={**table.notes, **notes}), options.format)
        for ending, draw in (figures or {}).items():
            if csv:
                save(draw(every), csv.with_name(f"{csv.stem}{ending}.png"))

    return present


@dataclass(frozen=True)
class Experiment:
    """The parts of a benchmark.

    Attributes:
        name: stem of the file of rows, and the command's name in messages.
        cell: the dataclass of its cells, whose fields are columns.
        make_cells: the grid; raises ValueError for what no cell can have. ``options.world_size`` is resolved by then.
        stages: how the cells are measured, mostly ``one_stage(measure)``.
        present: prints tables and draws figures, mostly ``presented(tables, figures)``.
        headlines: metrics of each cell's line on stderr.
        options: the dataclass of its command line, as ``options_of`` makes it.
        measured: whether a cell counts as measured; ceilings do not.
        default_worlds: numbers of ranks on a device where the command line does not say; by default one rank per GPU.
        preloaded: (options) -> modules that fresh processes find imported.
    """

    name: str
    cell: type
    make_cells: Callable[[Any], Sequence[Cell]]
    stages: Stages
    present: Present
    headlines: Sequence[str]
    options: Any = None
    measured: Callable[[Any], bool] = lambda cell: True
    default_worlds: Callable[[str], tuple[int, ...]] | None = None
    preloaded: Callable[[Any], Sequence[str]] = lambda options: PRELOADED

    def run(self, options: Any) -> int:
        """Measure all cells and present them; returns the exit code."""
        from cs336_systems.harness.isolation import reports
        from cs336_systems.harness.record import RowFile
        from cs336_systems.harness.sweep import cell_columns

        csv = options.out / f"{self.name}.csv" if options.out else None
        try:
            options, cells = self.prepare(options)
            row_file = RowFile(csv, cell_columns(self.cell)) if csv and reports() else None
            if reports() and (note := small_defaults_note(options)):
                print(note, file=sys.stderr)
        except (ValueError, OSError) as error:
            return complain(self.name, error)
        outcomes: list[Outcome] = []
        failure = self._measure(options, cells, row_file, outcomes)
        if not reports():
            return 0
        code = failure
        try:
            if outcomes:
                code = self.present(outcomes, options, csv) or failure
                _say_load(outcomes)
        except OSError as error:
            code = complain(self.name, f"a figure or page could not be written: {os_error(error)}")
        return code or finish(self, cells, outcomes, csv)

    def prepare(self, options: Any) -> tuple[Any, Sequence[Cell]]:
        """The options with the world sizes that they mean here, and the grid, once all is checked.

        Raises:
            ValueError: a value that no cell can have, or a device or launcher that is not there.
            OSError: a file that an option names cannot be read.
        """
        check_device(options.device)
        check_options(options)
        if hasattr(options, "world_size"):
            from cs336_systems.harness.launcher import one_rank_per_gpu, resolve_world_sizes

            default = (self.default_worlds or one_rank_per_gpu)(options.device)
            worlds = resolve_world_sizes(options.world_size, default)
            options = replace(options, world_size=worlds)
        check_dtypes(options)
        return options, self.make_cells(options)

    def _measure(
        self, options: RunOptions, cells: Sequence[Cell], row_file: RowFile | None, outcomes: list[Outcome]
    ) -> int:
        """Fill ``outcomes``, stage by stage; the code of what ended it, else 0."""
        from cs336_systems.harness.sweep import run_sweep

        sweep = functools.partial(
            run_sweep, self.name, row_file=row_file, timeout_s=options.timeout, headlines=self.headlines
        )
        try:
            for stage in self.stages(options, cells, outcomes):
                outcomes.extend(sweep(stage.cells, stage.measure, share=stage.share))
                if outcomes and outcomes[-1].status == "interrupted":
                    return 0
        except ValueError as error:
            return complain(self.name, error)
        except OSError as error:
            where = row_file.path if row_file else "the disk"
            fault = f"rows could not be written to {where}: {os_error(error)}; earlier rows are there"
            return complain(self.name, fault)
        return 0


def command(experiment: Experiment, description: str | None) -> Callable[..., int]:
    """The ``main`` of a benchmark's command: (arguments) -> exit code; ``description`` is for ``--help``."""

    def main(arguments: list[str] | None = None) -> int:
        options = parse(experiment.options, arguments, description)
        start_server(*experiment.preloaded(options))
        return experiment.run(options)

    return main


def check_device(device: str) -> None:
    """Raise ValueError if ``--device`` asks for CUDA and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")


def check_dtypes(options: Any) -> None:
    """Raise ValueError if the device cannot multiply in one of ``--dtype``, where they are training precisions, or
    quantized as ``--matmul-dtype`` and ``--scaling`` say."""
    import torch

    from cs336_systems.training.precision import recipe_unsupported_reason, unsupported_reason

    given, device = getattr(options, "dtype", ()), torch.device(options.device)
    dtypes = [dtype for dtype in ((given,) if isinstance(given, str) else given) if dtype in PRECISIONS]
    for dtype in dtypes:
        if reason := unsupported_reason(PRECISIONS[dtype], device):
            raise ValueError(f"--dtype {dtype}: {reason}")
    recipes = itertools.product(dtypes, getattr(options, "matmul_dtype", ()), getattr(options, "scaling", ()))
    for dtype, name, scaling in recipes:
        if reason := recipe_unsupported_reason(Recipe(name, scaling=scaling), PRECISIONS[dtype], device):
            raise ValueError(f"--matmul-dtype {name}: {reason}")


def _say_load(outcomes: Sequence[Outcome]) -> None:
    """If the tables have times, warn below them if the machine was busy, with more than one process per core."""
    from cs336_systems.harness.sweep import outcome_rows
    from cs336_systems.report.compare import overload

    times = any(re.match(r"(us|ms|s)\b", metric.unit) for outcome in outcomes for metric in outcome.metrics)
    if times and (load := overload(outcome_rows(outcomes), per_core=1.5)):
        print(f"{load[0].upper()}{load[1:]}: it would measure shorter times alone.\n")


def finish(experiment: Experiment, cells: Sequence[Cell], outcomes: Sequence[Outcome], csv: Path | None) -> int:
    """Print the last line of stdout, one JSON object, and return the exit code.

    It says how many cells were measured of those that were asked for, how the first of them ended, and where rows are.
    """
    asked = [outcome for outcome in outcomes if experiment.measured(outcome.cell)]
    n_asked = sum(map(experiment.measured, cells))
    statuses = [outcome.status for outcome in asked]
    said = [{"cell": str(each.cell), "status": each.status, "message": each.message} for each in outcomes[:_MOST_CELLS]]
    line = {"benchmark": experiment.name, "ok": statuses.count("ok"), "asked": n_asked, "cells": said}
    print(json.dumps(line | {"csv": str(csv) if csv else None}))
    if outcomes and outcomes[-1].status == "interrupted":
        if n_asked > len(asked):
            print(f"{experiment.name}: {n_asked - len(asked)} of {n_asked} cells were not begun", file=sys.stderr)
        return INTERRUPTED
    if "ok" not in statuses:
        reasons = dict.fromkeys(f"{outcome.status}: {outcome.message}" for outcome in asked)
        print(f"{experiment.name}: nothing was measured: {'; '.join(reasons) or 'no cell was run'}", file=sys.stderr)
        return 1
    return int(any(outcome.status in ("error", "timeout") for outcome in outcomes))
