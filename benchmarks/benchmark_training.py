"""How fast does a run train? Steady tokens/s of train.py's trainer, and of transformers, with Liger or torchao too.

    uv run benchmarks/benchmark_training.py                                      # a tiny model on a CPU, five seconds
    uv run benchmarks/benchmark_training.py --size qwen2.5-0.5b --batch-size 32 --keep all --out results/

Tokens are random, as only speed is measured. The first steps, which compile, allocate and capture, are left out. Each
run has a process of its own; on an H200 it takes a minute and a half, at 7B four minutes.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.training import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
