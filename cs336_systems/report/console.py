"""What a benchmark says to whoever ran it: one sentence on bad input, a last line of JSON."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import tyro

from cs336_systems.harness.sweep import Outcome

BAD_INPUT = 2
INTERRUPTED = 130


class HasDevice(Protocol):
    """Options of a benchmark: a frozen dataclass for tyro, with at least a device."""

    @property
    def device(self) -> str: ...


Options = TypeVar("Options", bound=HasDevice)


def parse_for_device(
    default_options: Callable[[str], Options], arguments: list[str] | None, description: str | None
) -> Options:
    """Options from the command line, with the defaults of the device that they name, else of the one found here."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    default = default_options(found)
    options = tyro.cli(type(default), args=arguments, default=default, description=description)
    if options.device == found:
        return options
    return tyro.cli(type(default), args=arguments, default=default_options(options.device), description=description)


def check_device(device: str) -> None:
    """Raise ValueError if ``--device`` asks for CUDA and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")


def complain(benchmark: str, message: str) -> int:
    """One sentence on stderr; returns the exit code of bad input."""
    print(f"{benchmark}: {message}", file=sys.stderr)
    return BAD_INPUT


def exit_with(benchmark: str, main: Callable[[], int]) -> NoReturn:
    """Run a command's ``main`` and exit with its code; Ctrl-C outside a cell is one sentence, not a traceback."""
    try:
        code = main()
    except KeyboardInterrupt:
        print(f"{benchmark}: interrupted; every finished row is kept", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def finish(
    benchmark: str,
    outcomes: Sequence[Outcome],
    describe: Callable[[Any], str],
    metrics: Sequence[str],
    csv: Path | None,
) -> int:
    """Print the last line of stdout, one JSON object with the medians of ``metrics``.

    Returns:
        The exit code: 130 after Ctrl-C, 1 if a cell ended in an error or timeout, 0 otherwise (memory that does not
        suffice and requests that are unsupported are answers).
    """
    cells = [
        {"cell": describe(outcome.cell), "status": outcome.status}
        | {name: median for name in metrics if (median := outcome.median(name)) is not None}
        for outcome in outcomes
    ]
    ok = sum(outcome.status == "ok" for outcome in outcomes)
    print(json.dumps({"benchmark": benchmark, "ok": ok, "cells": cells, "csv": str(csv) if csv else None}))
    if outcomes and outcomes[-1].status == "interrupted":
        return INTERRUPTED
    return int(any(outcome.status in ("error", "timeout") for outcome in outcomes))
