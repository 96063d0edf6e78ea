"""What does a collective cost on this machine, and does a ring of equal links explain it?

    uv run benchmarks/benchmark_collectives.py                       # two ranks on a CPU, else all GPUs
    uv run benchmarks/benchmark_collectives.py --world-size 2 4 --size-mb 1 100 --out results/
    uv run torchrun --nproc-per-node 4 benchmarks/benchmark_collectives.py --dtype fp32 bf16 --out results/
    torchrun benchmarks/benchmark_collectives.py                              # one rank: calls that send nothing

A sample is the mean of ``--calls`` consecutive calls on the slowest rank, as in nccl-tests: the host's launch latency
then shows in the first call only. Sizes are total bytes, MB is 1e6 bytes; algbw and busbw are nccl-tests'. After
timing, each collective runs once more and every element of every rank is checked. Each time stands beside that of a
ring of equal links, whose latency and bandwidth are fitted to all times of the same run and number of ranks; each busbw
is shown with its share of the link's datasheet bandwidth.
"""

from cs336_systems.experiments.collectives import EXPERIMENT
from cs336_systems.experiments.driver import command
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
