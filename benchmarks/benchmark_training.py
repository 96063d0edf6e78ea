"""How fast does a run train? Steady tokens per second of train.py's trainer, and of transformers, also with Liger.

    uv run benchmarks/benchmark_training.py                                      # a tiny model on a CPU, five seconds
    uv run benchmarks/benchmark_training.py --size qwen2.5-0.5b --batch-size 32 --keep all --out results/

Sequences are of random tokens: what is learned is not asked here. The first steps compile, allocate and capture, and
are left out. On an H200 a run takes a minute and a half; ours and the others follow each other, each in its process.
"""

from cs336_systems.experiments.training.cells import Options
from cs336_systems.report.command_line import exit_with, experiment_command

main = experiment_command(Options, "training.experiment", __doc__)

if __name__ == "__main__":
    exit_with("benchmark_training", main)
