"""Every run's figures in one table, and the fastest of each size."""

from typing import Any

import pandas as pd

from cs336_systems.harness.runs import newest_run, pooled
from cs336_systems.report.results import MAIN, Column, ResultTable

TRAINING_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "total_batch_tokens", "dtype", "how"),
        *("world_size", "zero"),
        *("kernels", "keep", "attention", "cuda_graph", "lmhead_chunks", "data", "warmup", "seconds"),
    ),
    always=("size", "how"),
    columns=(
        Column("step ms", "step", ",.1f"),
        Column("tokens/s", "tokens_per_s", ",.0f", rank=MAIN, note="median of the steps after the first few"),
        Column("speed of light %", "speed_of_light", ".1f", optional=True),
        Column("peak GiB", "peak_memory", ".1f", optional=True),
        Column("predicted GiB", "predicted_peak_memory", ".1f", optional=True),
    ),
)

MEDIANS = ("tokens_per_s", "speed_of_light", "peak_memory", "predicted_peak_memory")


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the runs of one rank that are ok the fastest of each size and way: their settings, and ``MEDIANS`` as columns.

    In the order in which sizes and ways were first measured; what a run has no row of is NaN.
    """
    alone = rows[(rows["status"] == "ok") & (rows["world_size"].astype(int) == 1)]
    settings = [name for name in TRAINING_TABLE.settings if name in rows]
    best: dict[tuple[Any, Any], dict[str, Any]] = {}
    for values, cell in alone.groupby(settings, sort=False, dropna=False):
        run: dict[str, Any] = dict(zip(settings, values, strict=True))
        medians = pooled(newest_run(cell)).set_index("metric")["median"]
        run |= {name: float(medians.get(name, float("nan"))) for name in MEDIANS}
        way = run["size"], run["how"]
        if way not in best or run["tokens_per_s"] > best[way]["tokens_per_s"]:
            best[way] = run
    return pd.DataFrame(best.values())
