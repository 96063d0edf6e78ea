"""``benchmark_fsdp``: the implementations in one table, with earlier rows of the file; pictures of recordings."""

from cs336_systems.experiments.fully_sharded.cells import FullyShardedCell, make_cells
from cs336_systems.experiments.fully_sharded.measure import measure_fully_sharded
from cs336_systems.experiments.fully_sharded.table import FULLY_SHARDED
from cs336_systems.experiments.ranked import traced_experiment

EXPERIMENT = traced_experiment(
    "benchmark_fsdp",
    FullyShardedCell,
    make_cells,
    measure_fully_sharded,
    FULLY_SHARDED.of,
    (
        *("step", "tokens_per_s", "parameters", "gradients", "optimizer_state", "state_error", "peak_memory"),
        *("sent_per_rank", "gathers", "late_gathers", "gather_wait", "hidden_share"),
    ),
)
