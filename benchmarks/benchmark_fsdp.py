"""What does full sharding save, and what does it cost? This suite's FSDP, torch's FSDP2 and data parallelism.

    uv run benchmarks/benchmark_fsdp.py                                         # two ranks, under a minute on a CPU
    uv run benchmarks/benchmark_fsdp.py --world-size 2 --prefetch 0 1 2 --fsdp ours --out results/
    uv run torchrun --nproc-per-node 2 benchmarks/benchmark_fsdp.py --size xl --dtype fp32 bf16-compute --repeat 2
    uv run torchrun --nproc-per-node 4 benchmarks/benchmark_fsdp.py --size 2.7b --checkpoint full --compile
    torchrun benchmarks/benchmark_fsdp.py --fsdp ours --trace traces/           # a picture: what runs when

Every rank trains on its own random batch of ``--batch-size``; a step takes as long as its slowest rank. Memory is
compared with its prediction, by category. For this suite's FSDP, the time that each unit waits for its weights is
measured.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.fully_sharded import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
