"""Cells that two ranks measure, each ending as it says; and a sweep of them for a launcher."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness import ranks
from cs336_systems.harness.process import Unsupported
from cs336_systems.harness.ranks import reports, run_ranked_sweep, time_phases_of_ranks
from cs336_systems.harness.record import Metric, RowFile
from cs336_systems.harness.sweep import cell_columns
from cs336_systems.report.console import finish

SLEEP_S = 0.02


@dataclass(frozen=True)
class Cell:
    """``what`` says how it ends."""

    what: str
    world_size: int = 2
    device: str = "cpu"
    seed: int = 7

    @property
    def variant(self) -> str:
        return "test"


def measure(cell: Cell, rank: Rank) -> list[Metric]:
    """End as the cell says."""
    if cell.what == "raise everywhere":
        raise Unsupported("no such thing anywhere")
    if cell.what == "raise on rank 1" and rank.rank == 1:
        raise MemoryError("not enough here")
    if cell.what == "raise late on rank 1":
        dist.barrier()
        if rank.rank == 1:
            raise ArithmeticError("too late for the others to notice")
        return [Metric("never", "", [0.0])]
    if cell.what == "stuck":
        if rank.rank == 1:
            raise ArithmeticError("nobody hears this")
        time.sleep(120)
    if cell.what == "kill" and rank.rank == 1:
        os.kill(os.getpid(), 9)
    if cell.what == "hang" and rank.rank == 1:
        time.sleep(120)
    total = torch.ones(1)
    phases = {"skewed": lambda: time.sleep(SLEEP_S * (1 + rank.rank)), "sum": lambda: dist.all_reduce(total)}
    times = time_phases_of_ranks(phases, rank, warmup=2, steps=3)
    same = torch.tensor(times.samples_ms["step"])
    dist.broadcast(same, 0)
    assert same.tolist() == torch.tensor(times.samples_ms["step"]).tolist()
    return [
        *(Metric(name, "ms", samples) for name, samples in times.samples_ms.items()),
        Metric("warmup_step", "ms", times.warmup_ms),
        Metric("sum_of_ones", "", [total.item()]),
        Metric("pid", "", [os.getpid()]),
    ]


def disagree(rank: Rank) -> str:
    """What ranks hear that would have timed different numbers of steps."""
    try:
        time_phases_of_ranks({"nothing": lambda: None}, rank, warmup=0, steps=1 + rank.rank)
    except ValueError as error:
        return str(error)
    return ""


def main() -> int:
    """Sweep the cells named on the command line into a folder, under a launcher."""
    ranks._AGREEMENT_GRACE_S = 6.0  # above PEER_LOST_HOLD_S, on a busy machine too
    folder, *whats = sys.argv[1:]
    csv = Path(folder, "rows.csv")
    outcomes = run_ranked_sweep(
        "script",
        [Cell(what, 3 if what == "other world" else 2) for what in whats],
        measure,
        device="cpu",
        row_file=RowFile(csv, cell_columns(Cell)) if reports() else None,
        timeout_s=60,
        describe=lambda cell: cell.what,
    )
    return finish("script", outcomes, lambda cell: cell.what, ("step",), csv) if reports() else 0


if __name__ == "__main__":
    sys.exit(main())
