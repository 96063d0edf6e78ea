"""How fast is each fused kernel, against plain PyTorch, torch.compile, other libraries' kernels and a copy?

    uv run benchmarks/benchmark_kernels.py                                     # plain PyTorch alone on a CPU
    uv run benchmarks/benchmark_kernels.py --kernel swiglu --rows 16384 --width 1024 4096 --out results/
    uv run benchmarks/benchmark_kernels.py --how eager compiled --dtype bf16
    uv run benchmarks/benchmark_kernels.py --kernel rms_norm --how ours liger torch --size llama3-8b --rows 4096 65536
    uv run benchmarks/benchmark_kernels.py --kernel cross_entropy --how ours quack liger-cute --vocabulary 131072

Forward and backward are timed separately, on a GPU with a cold L2 cache. GB/s count the bytes that any implementation
must move, and are shown with their share of a large copy, timed in the same process. Errors are relative Frobenius
norms against the formula in fp64. On a GPU the peak of memory beyond inputs and results is measured too. Other
libraries' kernels run as ``cs336_systems/experiments/kernel_peers.py`` says; those of quack, of Liger and of cut cross
entropy need their packages. On an H200 the defaults take about ten minutes, half of them for the head and loss;
``scripts/measure_kernels.sh`` runs them in parts.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.kernels import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
