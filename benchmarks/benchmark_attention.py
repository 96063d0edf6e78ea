"""Which attention for these shapes? Time, memory and error of every implementation, and the limit.

    uv run benchmarks/benchmark_attention.py                                  # the grid that fits this machine
    uv run benchmarks/benchmark_attention.py --grid training --impl hopper flash sdpa-cudnn flex --repeat 3
    uv run benchmarks/benchmark_attention.py --grid training --impl hopper flash-attn-4 --clock device
    uv run benchmarks/benchmark_attention.py --grid flash --d-head 64 --length 1024 4096 --dtype bf16 --out results/
    uv run benchmarks/benchmark_attention.py --grid flash --impl flash hopper --clock harness do-bench --dtype bf16

Grids: ``pytorch``, the handout's first (batch 8, no head dimension, plain and compiled); ``flash``, its second (batch
1, causal, every implementation); ``training``, the shapes at which training runs; ``variants``, masks and score
modifications, FlexAttention against torch's attention with a dense mask. ``cs336_systems/experiments/
attention_measure.py`` says how each cell is measured. Memory is predicted first; a cell that cannot fit becomes a row
and is not run. Cells of one grid and dtype share a process, which starts and loads kernels once. With ``--repeat`` the
implementations are interleaved at each shape, so that they run at the same temperature, power and clock.
"""

from cs336_systems.experiments.attention import EXPERIMENT
from cs336_systems.experiments.driver import command
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
