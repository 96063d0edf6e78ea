"""What does a Transformer block with a hand-written backward cost, by what it keeps, and what a compiled one?

    uv run benchmarks/benchmark_blocks.py                                     # a tiny block in plain PyTorch on a CPU
    uv run benchmarks/benchmark_blocks.py --size llama3-8b --context-length 8192 --batch-size 2 --how compiled products
    uv run benchmarks/benchmark_blocks.py --how compiled products all-norm --layers 6 --out results/

At each shape the variants are interleaved in one process, on the same weights and data, ``--repeat`` times; ratios are
taken within each repeat. Forward and backward are timed inside one pass; backward computes every gradient. Errors are
those of one block on a short sequence, against fp64. On an H200 the defaults take about four minutes.
"""

from cs336_systems.experiments.blocks import EXPERIMENT
from cs336_systems.experiments.driver import command
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
