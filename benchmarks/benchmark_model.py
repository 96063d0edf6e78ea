"""What does a training step of this model cost on this machine? Forward, backward and optimizer, and their limits.

    uv run benchmarks/benchmark_model.py                                   # the size small; on a CPU about a minute
    uv run benchmarks/benchmark_model.py --size small medium --context-length 256 512 --dtype fp32 bf16
    uv run benchmarks/benchmark_model.py --size xl --mode forward --out results/
    uv run benchmarks/benchmark_model.py --size small --compare results/benchmark_model.csv
    uv run benchmarks/benchmark_model.py --size small --keep autograd autograd-input autograd-every-3 --mode step

Options that take several values make a grid, and every cell of the grid runs in a process of its own. Parameters,
tokens and targets are random. Each cell's peak memory is predicted first, and a cell that cannot fit is reported but
not run.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.model import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
