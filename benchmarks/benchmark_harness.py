"""Does this suite's clock agree with triton's?

    uv run benchmarks/benchmark_harness.py --out results/

On a GPU, ``time_kernel`` and ``triton.testing.do_bench`` time the same operation on the same tensors in alternating
rounds; each round yields one ratio of medians, which should lie within two percent of one.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.harness_cost import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
