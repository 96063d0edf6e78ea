"""How fast is each fused kernel, beside plain PyTorch, torch.compile and a copy?

    uv run benchmarks/benchmark_kernels.py                                     # plain PyTorch alone on a CPU
    uv run benchmarks/benchmark_kernels.py --kernel weighted_sum --rows 16384 --width 1024 4096 --out results/
    uv run benchmarks/benchmark_kernels.py --how eager compiled --dtype bf16

Forward and backward are timed separately, backward as backward, on a GPU with a cold L2 cache. GB/s count the bytes
that must move, however it is computed; beside them stands their share of a large copy, timed in the same process.
Errors are relative Frobenius norms against the formula in fp64.
"""

from cs336_systems.experiments.kernels.cells import default_options
from cs336_systems.report.command_line import exit_with, parse


def main(arguments: list[str] | None = None) -> int:
    """Parse, then measure; returns the exit code."""
    options = parse(default_options, arguments, __doc__)
    from cs336_systems.experiments.kernels.experiment import EXPERIMENT  # torch and pandas come with it

    return EXPERIMENT.run(options)


if __name__ == "__main__":
    exit_with("benchmark_kernels", main)
