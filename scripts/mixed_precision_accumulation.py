"""What do a thousand times 0.01 add up to in low precision?

    uv run scripts/mixed_precision_accumulation.py                      # 1,000 and 10,000 terms
    uv run scripts/mixed_precision_accumulation.py --terms 100 --term 0.1

Terms and accumulator are fp32, fp16 or bf16; the terms are added in order.
"""

import json
from dataclasses import dataclass

from cs336_systems.report.command_line import Format, cli, complain, exit_with

NAME = "mixed_precision_accumulation"


@dataclass(frozen=True)
class Options:
    """What a sum of equal terms comes to in low precision."""

    terms: tuple[int, ...] = (1000, 10_000)
    """Numbers of terms."""
    term: float = 0.01
    """Value of each term."""
    format: Format = "auto"
    """Format of the table: auto draws it on a terminal and writes Markdown elsewhere."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, add up and print; returns the exit code."""
    options = cli(Options, arguments, __doc__)
    from cs336_systems.experiments.precision import sums  # torch and pandas come with it
    from cs336_systems.report.tables import Table, show

    try:
        frame = sums(options.terms, options.term)
    except ValueError as error:
        return complain(NAME, error)
    shown = frame.assign(
        terms=[f"{n:,}" for n in frame["terms"]],
        exact=[f"{value:g}" for value in frame["exact"]],
        result=[f"{value:.7g}" for value in frame["result"]],
        relative_error=[f"{value:+.1e}" for value in frame["relative_error"]],
    ).rename(columns={"relative_error": "relative error", "dtype": "dtype of terms"})
    show(Table(f"Sums of {options.term:g}.", shown), options.format)
    print(json.dumps({"script": NAME, "sums": frame.to_dict("records")}))
    return 0


if __name__ == "__main__":
    exit_with(NAME, main)
