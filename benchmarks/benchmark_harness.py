"""What does measuring itself cost? This suite's clock against triton's, and a command's time beyond its timed steps.

    uv run benchmarks/benchmark_harness.py --out results/

On a GPU, ``time_kernel`` and ``triton.testing.do_bench`` time the same operation on the same tensors in alternating
rounds; each round yields one ratio of medians, which should lie within two percent of one. On any machine
``benchmark_model.py --size small --mode step`` is run as a user would run it, and its time beyond the timed steps is
reported.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.harness_cost import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
