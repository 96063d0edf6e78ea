"""How fast does a run train? Tokens/s, once steady, of train.py's trainer and of transformers, with Liger or torchao.

    uv run benchmarks/benchmark_training.py                                      # a tiny model on a CPU, five seconds
    uv run benchmarks/benchmark_training.py --size qwen2.5-0.5b --batch-size 32 --keep all --out results/

Tokens are random, as only speed is measured. The first steps compile, allocate and capture, and are left out. On an
H200 a run takes a minute and a half, of 7B four; each run has a process of its own.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.training import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
