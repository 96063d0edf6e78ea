"""What does a collective cost on this machine, and does a ring of equal links explain it?

Every collective is timed on all ranks and every element of its result checked. One link, a latency and a bandwidth, is
fitted to all times of a world (``costs.communication.fit``), so that the prediction in each line is not of that line
alone: where it is off, the collective is not the ring that the model has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cs336_systems.costs.communication import COLLECTIVES, Link, RingCost, busbw, cost, fit
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions, every
from cs336_systems.experiments.ranked import largest
from cs336_systems.hardware import find_hardware
from cs336_systems.report.results import MAIN, Column, Line, ResultTable
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.record import Metric

_ALIGNMENT = 128
"""Bytes of which every rank's part is a multiple, so that no part begins in the middle of a memory sector."""

_MOST_MB = 8000
"""Largest total size, in MB: with the copies that are checked, several of them must fit a GPU."""


@dataclass(frozen=True)
class CollectiveCell:
    """One collective of one size in one world; the fields are columns."""

    device: str = "cpu"
    world_size: int = option(
        2,
        "Numbers of ranks on this machine, each a world of its own; by default all GPUs, or two ranks on a CPU. Under "
        "torchrun it is torchrun's number.",
        asked=None,
    )
    dtype: str = option(
        "fp32",
        "Dtype of the tensors; they hold a fixed pattern, so the seed is only recorded.",
        values=("fp32", "bf16"),
    )
    collective: str = option("all_reduce", "Collectives to time.", values=COLLECTIVES, asked=COLLECTIVES)
    size_mb: float = option(
        1,
        "Total sizes in MB of 1e6 bytes, rounded down so that each rank's part is a multiple of 128 bytes.",
        asked=(1, 10, 100, 1000),
    )
    total_bytes: int = 0
    calls: int = option(5, "Calls per sample.", several=False, sign="positive")
    warmup: int = option(5, "Samples before the recorded ones.", several=False, sign="not negative")
    steps: int = option(20, "Recorded samples.", several=False, sign="positive")
    seed: int = 0

    @property
    def variant(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def __str__(self) -> str:
        return f"{self.collective} {self.size_mb:g} MB {self.dtype} on {self.world_size} ranks ({self.variant})"


CPU = {"size_mb": (1, 10), "calls": 1, "warmup": 1, "steps": 10}
Options: Any = options_of(CollectiveCell, RunOptions, cpu=CPU)


def make_cells(options: Any) -> list[CollectiveCell]:
    """The grid; raises ValueError for a size that the ranks cannot divide, or that is too large."""
    cells = []
    for cell in every(CollectiveCell, options, total_bytes=[0]):
        part = cell.world_size * _ALIGNMENT
        if not part <= 1e6 * cell.size_mb <= 1e6 * _MOST_MB:
            raise ValueError(f"--size-mb must lie between {part / 1e6:g} and {_MOST_MB}, got {cell.size_mb:g}")
        cells.append(replace(cell, total_bytes=int(cell.size_mb * 1e6) // part * part))
    return cells


def measure(cell: CollectiveCell, rank: Rank) -> list[Metric]:
    """Time one collective on all ranks, then check every element of its result.

    Raises:
        RuntimeError: an element is wrong on some rank.
    """
    from cs336_systems.distributed.collectives import Exchange
    from cs336_systems.harness.clock import time_phases_of_ranks
    from cs336_systems.harness.record import Metric
    from cs336_systems.training.precision import DTYPES

    dtype = DTYPES[cell.dtype]
    exchange = Exchange(cell.collective, cell.total_bytes // dtype.itemsize, dtype, rank)

    def calls() -> None:
        for _ in range(cell.calls):
            exchange.run()

    phases = {"reset": exchange.reset, "calls": calls}  # summed again and again, in-place results would overflow
    times = time_phases_of_ranks(phases, rank, warmup=cell.warmup, steps=cell.steps)
    exchange.reset()
    exchange.run()
    if wrong := int(largest(exchange.wrong_elements(), rank)):
        raise RuntimeError(f"{wrong} elements of {cell.collective} are not the exact sum or copy")
    seconds = [ms / 1e3 / cell.calls for ms in times.samples_ms["calls"]]
    algorithm = [cell.total_bytes / s / 1e9 for s in seconds]
    bus = [busbw(cell.collective, cell.world_size, cell.total_bytes, s) / 1e9 for s in seconds]
    return [
        Metric("time", "ms", [1e3 * s for s in seconds]),
        Metric("algbw", "GB/s", algorithm, derived=True),
        Metric("busbw", "GB/s", bus, derived=True),
    ]


_SETTINGS = ("gpu", "device", "variant", "world_size", "dtype", "collective", "size_mb", "calls")


def world_link(line: Line) -> Link | None:
    """The link that best explains the times of all collectives, sizes and dtypes between the line's ranks, if any can.

    A world of one rank, or of one size, has nothing to fit.
    """
    of_world = ["gpu", "host", "variant", "world_size"]
    world = [each for each in line.lines.values() if (each.last[of_world] == line.last[of_world]).all()]
    times = [(_cost(each), each.median("time")) for each in world]
    try:
        return fit([(ring, ms / 1e3) for ring, ms in times if ms is not None])
    except ValueError:
        return None


def _cost(line: Line) -> RingCost:
    return cost(line.last["collective"], int(line.last["world_size"]), int(line.last["total_bytes"]))


def _ring_ms(line: Line) -> float | None:
    link = world_link(line)
    return 1e3 * link.seconds(_cost(line)) if link and "time" in line.metrics else None


def _over_ring(line: Line) -> float | None:
    ms, ring = line.median("time"), _ring_ms(line)
    return ms / ring if ms and ring else None


def _link_percent(line: Line) -> float | None:
    hardware, bus = find_hardware(line.last["gpu"]), line.median("busbw")
    return 1e11 * bus / hardware.link_bytes_per_s if bus and hardware and hardware.link_bytes_per_s else None


COLLECTIVES_TABLE = ResultTable(
    settings=_SETTINGS,
    always=("collective",),
    labels={"variant": "backend", "world_size": "ranks", "size_mb": "MB"},
    columns=(
        Column("time ms", "time", spread=True, rank=MAIN),
        Column("algbw GB/s", "algbw", rank=2),
        Column("busbw GB/s", "busbw"),
        Column("% of link", _link_percent, ".0f", note="busbw over the datasheet rate of one direction"),
        Column("ring ms", _ring_ms, rank=2),
        Column("time / ring", _over_ring, ".2f"),
    ),
)


def collectives_table(rows: pd.DataFrame) -> Table:
    """One line per cell: time with its spread, the bandwidths, the ring's prediction; the rings in the caption."""
    table, links = COLLECTIVES_TABLE.of(rows), dict[str, Link]()
    for line in COLLECTIVES_TABLE.lines(rows):
        if link := world_link(line):
            links[f"{line.last['world_size']} ranks"] = link
    if not links:
        return table
    fitted = "; ".join(
        f"{ranks}: {digits(link.alpha_s * 1e6)} µs per message, {_bandwidth(link)}" for ranks, link in links.items()
    )
    return replace(table, caption=f"{table.caption}. Ring fitted to all times of a world: {fitted}.")


def _bandwidth(link: Link) -> str:
    if math.isinf(link.bytes_per_s):
        return "times that do not grow with the bytes (too few or too noisy points for a bandwidth)"
    return f"{digits(link.bytes_per_s / 1e9)} GB/s"


_PANELS = {"time": "time, ms (median, bar p10 to p90)", "busbw": "busbw, GB/s (as nccl-tests)"}


def collectives_figure(rows: pd.DataFrame) -> Figure | None:
    """Time and bus bandwidth against size, a line for each collective (colour) and world (marker and dash).

    Of several dtypes the one with the most points is drawn, of several machines the last.
    """
    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import lines

    rows = newest(rows, [*_SETTINGS, "host"])
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return None
    first = rows.iloc[-1]
    rows = rows[(rows["dtype"] == rows["dtype"].mode().iloc[0]) & rows["metric"].isin(_PANELS)]
    rows = rows[(rows[["gpu", "host", "variant"]] == first[["gpu", "host", "variant"]]).all(axis=1)]
    rows = rows.assign(ranks=rows["world_size"].astype(str) + " ranks").sort_values(
        ["size_mb", "world_size"], kind="stable"
    )
    figure, axes = lines(
        rows, x="size_mb", colour="collective", style="ranks", panel="metric", spread=True, log="xy", width=4.2
    )
    for metric, panel in axes.items():
        panel.set(xlabel="total size, MB", ylabel=_PANELS[metric])
    axes["busbw"].set_yscale("linear")
    if (hardware := find_hardware(first["gpu"])) and hardware.link_bytes_per_s:
        height = hardware.link_bytes_per_s / 1e9
        axes["busbw"].axhline(height, color="0.3", linewidth=1)
        axes["busbw"].annotate("link, datasheet", (0.02, height), xycoords=("axes fraction", "data"), va="bottom")
    axes["busbw"].set_ylim(bottom=0)
    where = first["gpu"] or first["host"]
    figure.suptitle(f"Collectives on {where}: {first['variant']}, {rows['dtype'].iloc[0]}", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    "benchmark_collectives",
    CollectiveCell,
    make_cells,
    one_stage(measure),
    presented(collectives_table, {"": collectives_figure}),
    ("time", "algbw", "busbw"),
    options=Options,
)
