"""What do ranks gain by sharing a batch? One step over meshes of pipeline, replica, shard, context and tensor
ranks.

    uv run benchmarks/benchmark_parallelism.py --world-size 1 2             # scaling of two ranks from one
    uv run benchmarks/benchmark_parallelism.py --world-size 1 2 4 --tensor 1 2 --context 1 2 --out results/
    uv run torchrun --nproc-per-node 2 benchmarks/benchmark_parallelism.py --size llama3-8b --batch-size 1 \
        --context-length 8192 --dtype bf16 --kernels fused --attention hopper --tensor 2 --context 1 --trace traces/

Every combination of --tensor, --context and --pipeline that divides the ranks is measured; ranks left over have batches
of their own. --batch-size is that of the ranks that share it. After the run parameters must have the same bits on all
ranks that hold them alike, or the cell fails.
"""

from cs336_systems.experiments.driver import command
from cs336_systems.experiments.mesh import EXPERIMENT
from cs336_systems.report.command_line import exit_with

main = command(EXPERIMENT, __doc__)

if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
