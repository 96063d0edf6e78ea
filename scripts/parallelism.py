"""Questions about training on many devices, answered by arithmetic: one subcommand for each.

    uv run scripts/parallelism.py search --gpus 64 --gpu h100 --size llama3-70b --batch-tokens 4M --tokens 15T
    uv run scripts/parallelism.py cases
    uv run scripts/parallelism.py published
    uv run scripts/parallelism.py cards
    uv run scripts/parallelism.py ring --world-size 8
    uv run scripts/parallelism.py forms --device h100 --world-size 8
    uv run scripts/parallelism.py mesh --world-size 256
    uv run scripts/parallelism.py accounting
    uv run scripts/parallelism.py pipeline --stages 4 --microbatches 8
    uv run scripts/parallelism.py scaling
    uv run scripts/parallelism.py failures

Nothing is run or measured. search, cases, published and cards predict by the rates that measured steps have; every
other number is a bound from datasheet peaks. The last line is one JSON object.
"""

from typing import Annotated, Any, Union

import tyro

from cs336_systems.answers.published import ALL_QUESTIONS
from cs336_systems.experiments.parallelism import run
from cs336_systems.report.command_line import cli, exit_with


def main(arguments: list[str] | None = None) -> int:
    """Answer the question that the subcommand names; returns the exit code."""
    kinds: Any = Union[tuple(Annotated[q, tyro.conf.subcommand(q.__name__.lower())] for q in ALL_QUESTIONS)]  # noqa: UP007
    return run(cli(kinds, arguments, __doc__))


if __name__ == "__main__":
    exit_with("parallelism", main)
