"""What does a failure cost? Replicas that go on without the one that died, beside a restart from the newest checkpoint.

    uv run --extra replicas benchmarks/benchmark_failures.py                       # on two CPU cores, two minutes
    uv run --extra replicas benchmarks/benchmark_failures.py --replicas 4 --steps 2000 --kills 40 --timeout 3000

Processes are killed by SIGKILL at random steps. From what was measured, goodput is predicted for jobs of up to
10,000 nodes, with ten failures per 1,000 node-days.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.failures import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
