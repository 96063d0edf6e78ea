"""What does a run learn, and how fast, with matrix products in fp8? Held-out loss, tokens/s, and gradients.

    uv run scripts/tokenize_data.py                                              # once: data/stdlib-bpe4096
    uv run benchmarks/benchmark_learning.py                                      # a tiny model on a CPU, emulated
    uv run benchmarks/benchmark_learning.py --recipe stored e4m3 --seeds 3 --out results/
    uv run benchmarks/benchmark_learning.py --data data/web-bpe32768 --steps 5000 --total-batch-tokens 262144

Runs with the same seed begin with the same weights and see the same tokens in the same order. All share a process, so
that only the first one compiles. On an H200 each run of the defaults takes ten seconds.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.learning import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
