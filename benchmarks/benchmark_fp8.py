"""What do matmuls in fp8 gain in a block, and how accurate are gradients? Beside torchao's float8.

    uv run benchmarks/benchmark_fp8.py                                          # a tiny block, emulated on a CPU
    uv run benchmarks/benchmark_fp8.py --how stored e4m3 e4m3-row torchao-rowwise --out results/
    uv run benchmarks/benchmark_fp8.py --size qwen2.5-7b --context-length 1024 --batch-size 16

At each shape the ways are interleaved in one process, on the same weights and data, ``--repeat`` times. Gradients are
compared, tensor by tensor, with those of fp32 on a short sequence. A CPU emulates fp8: its times say nothing of a
GPU's. For whole runs use ``benchmark_training.py --recipe``.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.fp8 import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
