"""``benchmark_ddp``: the rungs in one table, with earlier rows of the file; pictures of recordings."""

from cs336_systems.experiments.data_parallel.cells import DataParallelCell, make_cells
from cs336_systems.experiments.data_parallel.measure import measure_data_parallel
from cs336_systems.experiments.data_parallel.table import DATA_PARALLEL
from cs336_systems.experiments.ranked import traced_experiment

EXPERIMENT = traced_experiment(
    "benchmark_ddp",
    DataParallelCell,
    make_cells,
    measure_data_parallel,
    DATA_PARALLEL.of,
    ("step", "backward", "local_step", "exposed", "exposed_share", "hidden_share", "tokens_per_s", "sent_per_rank"),
)
