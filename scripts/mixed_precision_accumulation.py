"""What do a thousand times 0.01 add up to in low precision? Where it goes wrong, and what repairs it.

    uv run scripts/mixed_precision_accumulation.py                      # 1,000 and 10,000 terms
    uv run scripts/mixed_precision_accumulation.py --terms 100 --term 0.1

Terms and accumulator are fp32, fp16 or bf16; the terms are added in order, with Kahan's compensation, and pairwise.
"""

import tyro

from cs336_systems.experiments.precision.options import SumOptions
from cs336_systems.report.command_line import exit_with


def main(arguments: list[str] | None = None) -> int:
    """Parse, then add up."""
    options = tyro.cli(SumOptions, args=arguments, description=__doc__)
    from cs336_systems.experiments.precision.accumulation import answer  # torch and pandas come with it

    return answer(options)


if __name__ == "__main__":
    exit_with("mixed_precision_accumulation", main)
