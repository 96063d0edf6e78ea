"""What does sharding the optimizer state save, and what does it cost? Memory by category and moment, and time.

    uv run benchmarks/benchmark_sharded_optimizer.py                            # tiny, two gloo ranks; one GPU per rank
    uv run benchmarks/benchmark_sharded_optimizer.py --size xl --world-size 2 --repeat 3 --out results/
    uv run torchrun --nproc-per-node 2 benchmarks/benchmark_sharded_optimizer.py --size xl --repeat 3 --out results/
    torchrun benchmarks/benchmark_sharded_optimizer.py --sharding replicated owned                 # one rank

Four ways to hold the state of AdamW (described in ``cs336_systems/experiments/sharded_optimizer.py``): replicated
(plain data parallelism), owned (the handout's sharded optimizer), scattered (ZeRO stage 1), and torch's
ZeroRedundancyOptimizer. ``--repeat`` runs all of them in turns, several times; ratios are to replicated of the same
repeat. Batch sizes are per rank. The time of a step is that of the slowest rank.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.sharded_optimizer import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
