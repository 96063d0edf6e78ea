"""What does each form of data parallelism gain? Naive, flat, overlapped and bucketed, against torch's DDP.

    uv run benchmarks/benchmark_ddp.py                                          # two ranks, under a minute on a CPU
    uv run benchmarks/benchmark_ddp.py --world-size 1 2 --ddp overlapped bucketed torch --out results/
    uv run torchrun --nproc-per-node 2 benchmarks/benchmark_ddp.py --size xl --dtype fp32 autocast-bf16 --out results/
    uv run torchrun --nproc-per-node 4 benchmarks/benchmark_ddp.py --ddp bucketed torch --bucket-size-mb 1 10 100 1000
    torchrun benchmarks/benchmark_ddp.py --ddp naive overlapped --trace traces/      # pictures: what runs when

Every rank trains on its own random batch of ``--batch-size``; a step takes as long as its slowest rank. Exposed
communication is the step less the same step without communication (``no_sync``), interleaved in the same processes.
After the run every parameter must have the same bits on all ranks, or the cell fails.
"""

from cs336_systems.experiments.data_parallel import EXPERIMENT
from cs336_systems.experiments.driver import command
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
