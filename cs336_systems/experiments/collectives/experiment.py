"""``benchmark_collectives``: time every collective on all ranks, check every element, show them against a ring."""

import sys
from pathlib import Path

import torch

from cs336_systems.costs.communication import algbw, busbw
from cs336_systems.distributed.collectives import Exchange
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.collectives.cells import CollectiveCell, Options, make_cells
from cs336_systems.experiments.collectives.table import collectives_figure, collectives_table
from cs336_systems.experiments.driver import Experiment, one_stage
from cs336_systems.experiments.ranked import total
from cs336_systems.harness.clock import time_phases_of_ranks
from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.sweep import Outcome, outcome_rows
from cs336_systems.report.figures import save
from cs336_systems.report.show import show

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_collective(cell: CollectiveCell, rank: Rank) -> list[Metric]:
    """Time one collective on all ranks, then check it."""
    dtype = DTYPES[cell.dtype]
    exchange = Exchange(cell.collective, cell.total_bytes // dtype.itemsize, dtype, rank)

    def calls() -> None:
        for _ in range(cell.calls):
            exchange.run()

    phases = {"reset": exchange.reset, "calls": calls}  # summed again and again, in-place results would overflow
    times = time_phases_of_ranks(phases, rank, warmup=cell.warmup, steps=cell.steps)
    exchange.reset()
    exchange.run()
    wrong = total(exchange.wrong_elements(), rank)
    seconds = [ms / 1e3 / cell.calls for ms in times.samples_ms["calls"]]
    algorithm = [algbw(cell.total_bytes, s) / 1e9 for s in seconds]
    bus = [busbw(cell.collective, cell.world_size, cell.total_bytes, s) / 1e9 for s in seconds]
    return [
        Metric("time", "ms", [1e3 * s for s in seconds]),
        Metric("algbw", "GB/s", algorithm, derived=True),
        Metric("busbw", "GB/s", bus, derived=True),
        Metric("wrong_elements", "", [wrong]),
    ]


def present(outcomes: list[Outcome], options: Options, csv: Path | None) -> int:
    """The table and the figure; 1 if an element was wrong."""
    show(collectives_table(outcome_rows(outcomes)), options.format)
    if csv:
        save(collectives_figure(read_rows(csv)), csv.with_suffix(".png"))
    wrong = [str(outcome.cell) for outcome in outcomes if outcome.median("wrong_elements")]
    if wrong:
        print(f"{EXPERIMENT.name}: wrong elements in {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def default_worlds(device: str) -> tuple[int, ...]:
    """2, 4 and 6 GPUs as far as there are any; two ranks on a CPU."""
    gpus = tuple(n for n in (2, 4, 6) if n <= torch.cuda.device_count()) or (1,)
    return gpus if device == "cuda" else (2,)


EXPERIMENT = Experiment(
    "benchmark_collectives",
    CollectiveCell,
    make_cells,
    one_stage(measure_collective),
    present,
    ("time", "algbw", "busbw", "wrong_elements"),
    default_worlds=default_worlds,
)
