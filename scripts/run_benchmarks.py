"""Run several benchmarks in one process per rank: launching and importing are paid once.

    uv run torchrun --standalone --nproc-per-node 2 scripts/run_benchmarks.py \\
        benchmark_ddp --size 2.7b --out results/ddp + benchmark_fsdp --size 2.7b --out results/fsdp

Names are those of the files in benchmarks/; ``+`` stands between commands. Each runs and writes as it does alone. They
share loaded modules and nothing else: every cell builds its own model, every benchmark its own process group. A command
that fails does not keep the next one from running; the exit code is the first that is not 0. Ctrl-C ends them all.

``--help`` shows this text; after a benchmark's name, that benchmark's options.
"""

import runpy
import sys
from pathlib import Path

from cs336_systems.report.command_line import INTERRUPTED, complain, exit_with, for_terminal

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SEPARATOR = "+"


def commands(arguments: list[str]) -> list[list[str]]:
    """The command lines: paths of benchmarks, each with its own arguments.

    Raises:
        ValueError: a benchmark that there is not, or a command that is empty.
    """
    found: list[list[str]] = [[]]
    for argument in arguments:
        if argument == SEPARATOR:
            found.append([])
        else:
            found[-1].append(argument)
    if [] in found:
        raise ValueError(f"a benchmark's name stands at the beginning and after every {SEPARATOR}")
    paths = [BENCHMARKS / f"{name}.py" for name, *_ in found]
    if missing := [path.stem for path in paths if not path.is_file()]:
        known = ", ".join(sorted(path.stem for path in BENCHMARKS.glob("benchmark_*.py")))
        raise ValueError(f"{missing[0]} is no benchmark: known are {known}")
    return [[str(path), *own[1:]] for path, own in zip(paths, found, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Run the commands one after another."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] in (["--help"], ["-h"]):
        print(for_terminal(__doc__))
        return 0
    try:
        found = commands(given)
    except ValueError as error:
        return complain("run_benchmarks", error)
    codes: list[int] = []
    for path, *own in found:
        sys.argv = [path, *own]  # what rows say they were measured by
        codes.append(_run(path, own))
        if codes[-1] == INTERRUPTED:
            if left := len(found) - len(codes):
                print(f"run_benchmarks: {left} of {len(found)} commands were not begun", file=sys.stderr)
            return INTERRUPTED
    return next((code for code in codes if code), 0)


def _run(path: str, arguments: list[str]) -> int:
    try:
        return int(runpy.run_path(path)["main"](arguments))
    except SystemExit as stop:  # bad input, which has been told
        return stop.code if isinstance(stop.code, int) else 1


if __name__ == "__main__":
    exit_with("run_benchmarks", main)
