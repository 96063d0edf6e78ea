"""The course of every benchmark: check, measure cell by cell, show, end with one line of JSON and a code.

A question supplies its parts as an ``Experiment``; ``run`` is the same for all, on one process, on ranks that it starts
and under torchrun (where rank 0 alone presents).

    EXPERIMENT = Experiment("benchmark_ddp", DataParallelCell, make_cells, stages, present, metrics)
    return EXPERIMENT.run(options)

Requested and nothing measured is exit code 1, with the reason; one failed cell among others is, too. Memory that does
not suffice and requests that are unsupported are answers as long as something was measured.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cs336_systems.config import PRECISIONS, Recipe
from cs336_systems.experiments.options import RunOptions, check_options, small_defaults_note
from cs336_systems.harness.process import Cell
from cs336_systems.harness.ranks import one_rank_per_gpu, reports, resolve_world_sizes
from cs336_systems.harness.record import RowFile
from cs336_systems.harness.sweep import Outcome, cell_columns, run_sweep
from cs336_systems.report.command_line import INTERRUPTED, complain, os_error
from cs336_systems.training.precision import recipe_unsupported_reason, unsupported_reason

_MOST_CELLS = 8
"""In the line of JSON; the rows on disk hold all."""

_SUFFIXES = {"%": "percent", "GB/s": "gb_per_s", "TFLOP/s": "tflops", "1/s": "per_s"}
"""Of units whose own letters make no name."""


@dataclass(frozen=True)
class Stage:
    """Cells that are measured in one way."""

    cells: Sequence[Cell]
    measure: Callable[..., Any]
    """A module-level function or a partial of one: (cell), or for cells of several ranks (cell, rank), -> metrics."""
    expected_s: Callable[[Any], float] | None = None
    """Seconds that a cell should take, for the progress display."""
    share: Callable[[Any], Hashable] | None = None
    """Successive cells with equal values share a process."""


Stages = Callable[[Any, Sequence[Any], list[Outcome]], Iterable[Stage]]
"""(options, cells, outcomes so far) -> stages, asked for the next one when the one before has ended."""


def one_stage(measure: Callable[..., Any], expected_s: Callable[[Any], float] | None = None) -> Stages:
    """All cells by one function."""
    return lambda options, cells, outcomes: [Stage(cells, measure, expected_s)]


@dataclass(frozen=True)
class Experiment:
    """A question's own parts.

    Attributes:
        name: stem of the file of rows, and the command's name in messages.
        cell: the dataclass of its cells, whose fields are columns.
        make_cells: the grid; raises ValueError for what no cell can have. ``options.world_size`` is resolved by then.
        present: prints tables and draws figures, given outcomes, options and the file of rows; a number that is not
            zero becomes the exit code, a mapping holds main figures of the last line on stdout.
        headlines: metrics of the last line on stdout.
        measured: whether a cell counts as an answer; ceilings do not.
        default_worlds: of ranks on a device, where the command line does not say.
    """

    name: str
    cell: type
    make_cells: Callable[[Any], Sequence[Cell]]
    stages: Stages
    present: Callable[[list[Outcome], Any, Path | None], int | Mapping[str, Any] | None]
    headlines: Sequence[str]
    measured: Callable[[Any], bool] = lambda cell: True
    default_worlds: Callable[[str], tuple[int, ...]] = one_rank_per_gpu

    def run(self, options: Any) -> int:
        """Measure all cells and present them; returns the exit code."""
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
        code, found = failure, None
        try:
            if outcomes:
                found = self.present(outcomes, options, csv)
        except OSError as error:
            code = complain(self.name, f"a figure or page could not be written: {os_error(error)}")
        if isinstance(found, int):
            code = found or code
        return code or finish(self, outcomes, csv, found if isinstance(found, Mapping) else {})

    def prepare(self, options: Any) -> tuple[Any, Sequence[Cell]]:
        """The options with the world sizes that they mean here, and the grid, once all is checked.

        Raises:
            ValueError: a value that no cell can have, or a device or launcher that is not there.
            OSError: a file that an option names cannot be read.
        """
        check_device(options.device)
        check_options(options)
        if hasattr(options, "world_size"):
            worlds = resolve_world_sizes(options.world_size, self.default_worlds(options.device))
            options = replace(options, world_size=worlds)
        check_dtypes(options)
        return options, self.make_cells(options)

    def _measure(
        self, options: RunOptions, cells: Sequence[Cell], row_file: RowFile | None, outcomes: list[Outcome]
    ) -> int:
        """Fill ``outcomes``, stage by stage; the code of what ended it, else 0."""
        sweep = functools.partial(run_sweep, self.name, row_file=row_file, timeout_s=options.timeout)
        try:
            for stage in self.stages(options, cells, outcomes):
                outcomes.extend(sweep(stage.cells, stage.measure, expected_s=stage.expected_s, share=stage.share))
                if outcomes and outcomes[-1].status == "interrupted":
                    return 0
        except ValueError as error:
            return complain(self.name, error)
        except OSError as error:
            where = row_file.path if row_file else "the disk"
            fault = f"rows could not be written to {where}: {os_error(error)}; earlier rows are there"
            return complain(self.name, fault)
        return 0


def check_device(device: str) -> None:
    """Raise ValueError if ``--device`` asks for CUDA and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")


def check_dtypes(options: Any) -> None:
    """Raise ValueError if the device cannot multiply in one of ``--dtype``, where they are training precisions, or
    quantized as ``--matmul-dtype`` and ``--scaling`` say."""
    given, device = getattr(options, "dtype", ()) if options.MULTIPLIES else (), torch.device(options.device)
    dtypes = [dtype for dtype in ((given,) if isinstance(given, str) else given) if dtype in PRECISIONS]
    for dtype in dtypes:
        if reason := unsupported_reason(PRECISIONS[dtype], device):
            raise ValueError(f"--dtype {dtype}: {reason}")
    recipes = itertools.product(dtypes, getattr(options, "matmul_dtype", ()), getattr(options, "scaling", ()))
    for dtype, name, scaling in recipes:
        if reason := recipe_unsupported_reason(Recipe(name, scaling=scaling), PRECISIONS[dtype], device):
            raise ValueError(f"--matmul-dtype {name}: {reason}")


def finish(experiment: Experiment, outcomes: Sequence[Outcome], csv: Path | None, figures: Mapping[str, Any]) -> int:
    """Print the last line of stdout, one JSON object with main ``figures``, and return the exit code.

    Units stand in the names. Where there are many cells the first of them are listed; the rows hold the others.
    """
    asked = [outcome for outcome in outcomes if experiment.measured(outcome.cell)]
    statuses = [outcome.status for outcome in asked]
    line: dict[str, Any] = {"benchmark": experiment.name, "ok": statuses.count("ok"), "asked": len(asked)}
    line["cells"] = [_summary(outcome, experiment) for outcome in outcomes[:_MOST_CELLS]]
    if len(outcomes) > _MOST_CELLS:
        line["cells_not_listed"] = len(outcomes) - _MOST_CELLS
    print(json.dumps(line | {**figures, "csv": str(csv) if csv else None}))
    if outcomes and outcomes[-1].status == "interrupted":
        return INTERRUPTED
    if "ok" not in statuses:
        reasons = dict.fromkeys(f"{outcome.status}: {outcome.message}" for outcome in asked)
        print(f"{experiment.name}: nothing was measured: {'; '.join(reasons) or 'no cell was run'}", file=sys.stderr)
        return 1
    return int(any(outcome.status in ("error", "timeout") for outcome in outcomes))


def _summary(outcome: Outcome, experiment: Experiment) -> dict[str, Any]:
    """One cell of the last line: what it is, how it ended, its headlines."""
    found = {
        metric_name(row["metric"], row["unit"]): float(f"{row['median']:.4g}")
        for row in outcome.rows
        if row.get("metric") in experiment.headlines
    }
    ended = {"status": outcome.status} | ({"message": outcome.message} if outcome.message else {})
    return {"cell": str(outcome.cell)} | ended | found


def metric_name(metric: str, unit: str) -> str:
    """A metric with its unit: ``forward`` in ``ms`` is ``forward_ms``; counts and ratios have none."""
    word = unit.replace(",", "").split(" ")[0]
    suffix = _SUFFIXES.get(word, word.lower() if word in ("ms", "s", "GiB", "MiB") else "")
    return metric if not suffix or metric.endswith(suffix) else f"{metric}_{suffix}"
