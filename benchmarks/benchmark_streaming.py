"""What does a training step cost under limits on device and host memory? A plan for them, simulated and measured.

    uv run benchmarks/benchmark_streaming.py                                  # a tiny model on a CPU
    uv run benchmarks/benchmark_streaming.py --gpu h200 --size llama3-8b --device-gib 16 24 40 --host-gib 60 96 120
    uv run benchmarks/benchmark_streaming.py --size llama3-8b --device-gib 24 --host-gib 75 --out results/
    uv run benchmarks/benchmark_streaming.py --size llama3-8b --world-size 1 2 --out results/
    uv run benchmarks/benchmark_streaming.py --size llama3-8b --peers compiled fsdp2-offload --out results/

With ``--gpu`` the command simulates a device of ``hardware.py`` on any machine; without it the step runs here, and its
times are shown beside the simulated ones. Weights and tokens are random. Every cell has a process of its own. If no
plan fits the limits, the row names the memory that is short. Without ``--tokens-per-step`` a step of an 8B model takes
half a minute or more. With ``--world-size 2`` layers are dealt to two ranks, each within the limits. ``--explain`` says
why a plan is as it is and what another GiB would bring.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.streaming import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
