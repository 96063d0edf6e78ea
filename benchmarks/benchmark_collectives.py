"""What does a collective cost on this machine, and does a ring of equal links explain it?

    uv run benchmarks/benchmark_collectives.py                       # two ranks on a CPU; 2, 4 and 6 GPUs, if there
    uv run benchmarks/benchmark_collectives.py --world-size 2 4 --size-mb 1 100 --out results/
    uv run torchrun --nproc-per-node 4 benchmarks/benchmark_collectives.py --dtype fp32 bf16 --out results/
    torchrun benchmarks/benchmark_collectives.py                              # a world of one: calls that send nothing

Time is that of the slowest rank in every sample, a sample the mean of ``--calls`` calls one after another (nccl-tests
does so too: the host's launch latency is hidden but for the first). Sizes are total bytes, MB is 1e6 bytes; algbw and
busbw are those of nccl-tests. After timing, each collective runs once more and every element of every rank is checked.
Beside each time stands what a ring would take whose latency and bandwidth are fitted to all times of the same world and
run, and beside each busbw its share of the link's datasheet bandwidth.
"""

from cs336_systems.experiments.collectives.cells import Options
from cs336_systems.report.command_line import exit_with, experiment_command

main = experiment_command(Options, "collectives.experiment", __doc__)

if __name__ == "__main__":
    exit_with("benchmark_collectives", main)
