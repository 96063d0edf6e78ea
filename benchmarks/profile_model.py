"""Where does a step of this model spend its time, or its memory? Kernels, phases, idle time; allocations, residuals.

    uv run benchmarks/profile_model.py --profiler kineto                  # anywhere; on a CPU it shows operators
    uv run benchmarks/profile_model.py --profiler nsys --size small large --context-length 128 512 --out digests/
    uv run benchmarks/profile_model.py --profiler memory --size 2.7b --context-length 2048 --mode step

nsys and kineto (torch.profiler) give the same tables; memory watches the allocator and lists what a block keeps for
backward. Each cell, one mode of one workload, runs in a process of its own: plain and annotated steps in turns, so that
the cost of annotation is known, then the recorded ones. Raw files go to the folder --raw; CSVs and pictures go to that
of --out, or to --raw without it. A run uses one profiler, because two would contend for the device.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.profile import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
