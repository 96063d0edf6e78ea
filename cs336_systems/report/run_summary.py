"""Runs by name, and a run in a handful of figures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_systems.pretraining.run_log import LOG
from cs336_systems.pretraining.run_reader import Run, read_run
from cs336_systems.pretraining.run_records import End, Options

_RECENT = 100
"""Steps of which the median is told."""


def read_runs(paths: Sequence[Path]) -> dict[str, Run]:
    """Logs, or folders that have one, by the folder's or the file's name; by the path where two are of one name.

    Raises:
        ValueError: a path is named twice, or no log of a run.
        OSError: a log cannot be read.
    """
    logs = [path / LOG if path.is_dir() else path for path in paths]
    short = [log.resolve().parent.name if log.name == LOG else log.stem for log in logs]
    runs: dict[str, Run] = {}
    for log, name in zip(logs, short, strict=True):
        name = name if short.count(name) == 1 else str(log)
        if name in runs:
            raise ValueError(f"{log} is named twice")
        runs[name] = read_run(log)
    return runs


def summary(run: Run) -> dict[str, Any]:
    """Where the run is: steps, newest losses, recent speed; None for what is not known or not finite."""
    steps, evaluations, end, options = run.steps, run.evaluations, run.last(End), run.last(Options)
    recent = steps.tail(_RECENT)[["tokens_per_s", "speed_of_light"]].median()
    return {
        "steps": int(steps["step"].iloc[-1]) + 1 if len(steps) else 0,
        "n_steps": options.n_steps if options else None,
        "loss": _finite(steps["loss"].iloc[-1]) if len(steps) else None,
        "evaluation_loss": _finite(evaluations["loss"].iloc[-1]) if len(evaluations) else None,
        "tokens_per_s": _finite(recent["tokens_per_s"]),
        "speed_of_light_percent": _finite(100 * recent["speed_of_light"]),
        "outliers": len(run.outliers),
        "ended": end.reason if end is not None and run.records[-1] is end else None,
    }


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
