"""What a benchmark makes of a command line on a CPU: its cells, or its exit code and what it prints."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.report.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
SWEEP = "cs336_systems.harness.sweep.run_sweep"


def cells_of(question: str, *arguments: str, device: str = "cpu") -> list[Any]:
    """The grid that a command line asks of a question; raises ValueError for bad input."""
    experiment = importlib.import_module(f"cs336_systems.experiments.{question}").EXPERIMENT
    _, cells = experiment.prepare(parse(experiment.options, ["--device", device, *arguments], None))
    return list(cells)


def run(command: str, capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``benchmarks/<command>.py`` in this process, on the CPU."""
    main = importlib.import_module(f"benchmarks.{command}").main
    try:
        code = main(["--device", "cpu", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def refusal(command: str, capsys: Any, monkeypatch: Any, *arguments: object) -> str:
    """The sentence on stderr with which the command refuses the arguments; nothing may be run."""
    with monkeypatch.context() as context:
        context.setattr(SWEEP, lambda *args, **kwargs: pytest.fail("something was run"))
        code, out, err = run(command, capsys, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith(f"{command}: ")
    return err.removeprefix(f"{command}: ").strip()


def run_in_a_process(command: str, *arguments: object) -> tuple[int, str, str]:
    """The same in a process of its own, as a user runs it."""
    line = [sys.executable, f"benchmarks/{command}.py", "--device", "cpu", *map(str, arguments)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr
