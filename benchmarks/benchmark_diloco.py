"""How much less must replicas send? Held-out loss of DiLoCo and data parallelism, against tokens and bytes sent.

    uv run --extra replicas benchmarks/benchmark_diloco.py                 # tiny on a CPU, H of 1, 10 and 30, a minute
    uv run --extra replicas benchmarks/benchmark_diloco.py --steps 1500 --agree-every 1 10 30 100 500 --replicas 1 2 4 \
        --out results/
    uv run --extra replicas benchmarks/benchmark_diloco.py --agree-every 30 --agree-fragments 1 3 --agree-delay 0 5

Each number of replicas also trains by data parallelism, on the same sequences in the same steps. --agree-every is H;
--steps must be a multiple of each. A replica takes a GPU of its own, or its share of the cores.
"""

import os

from cs336_systems.experiments.diloco import EXPERIMENT
from cs336_systems.experiments.driver import command
from cs336_systems.report.command_line import exit_with


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported, which else says several lines a step
    return command(EXPERIMENT, __doc__)(arguments)


if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
