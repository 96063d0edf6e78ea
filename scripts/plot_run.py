"""Draw training runs, also while they run: loss, norm, learning rate, tokens/s, share of the speed of light, GPU state.

    uv run scripts/plot_run.py runs/first
    uv run scripts/plot_run.py runs/first runs/second/log.jsonl --x tokens --out compared.png

A run is its folder or its log. The last line on stdout is one JSON object with the picture and the runs' names.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from cs336_systems.report.command_line import cli, complain, exit_with

NAME = "plot_run"


@dataclass(frozen=True)
class PlotOptions:
    """Logs into a picture."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or their logs."""
    out: Path | None = None
    """PNG to write; by default next to the first log, with its name, or of several runs compared.png."""
    x: Literal["step", "tokens", "hours"] = "step"
    """Horizontal axis; hours count the time of training steps only."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, read, draw; returns the exit code."""
    options = cli(PlotOptions, arguments, __doc__)
    from cs336_systems.report.figures import save  # matplotlib and pandas come with it
    from cs336_systems.report.run_figure import read_runs, run_figure

    try:
        runs = read_runs(options.runs)
        figure = run_figure(runs, options.x)
        first = next(iter(runs.values())).path
        out = options.out or (first.with_suffix(".png") if len(runs) == 1 else first.with_name("compared.png"))
        save(figure, out)
    except (ValueError, OSError) as error:
        return complain(NAME, error)
    for run in runs.values():
        if run.torn:
            print(f"{NAME}: {run.path}: left out its last line, which is not whole", file=sys.stderr)
    print(json.dumps({"command": NAME, "out": str(out), "runs": list(runs)}))
    return 0


if __name__ == "__main__":
    exit_with(NAME, main)
