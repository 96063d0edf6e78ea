"""What does a collective cost on this machine, and does a ring of equal links explain it?

Every collective is timed on all ranks and every element of its result checked. One link, a latency and a bandwidth, is
fitted to all times of a world (``costs.communication.fit``), so that the prediction in each line is not of that line
alone: where it is off, the collective is not the ring that the model has.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.costs.communication import COLLECTIVES, Link, RingCost, algbw, busbw, cost, fit
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.experiments.ranked import total
from cs336_systems.hardware import find_hardware
from cs336_systems.report.results import MAIN, Column, Line, ResultTable
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.harness.record import Metric
    from cs336_systems.harness.sweep import Outcome

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
        "Numbers of ranks on this machine, each a world of its own; by default 2, 4 and 6 GPUs as far as there are any,"
        " or two ranks on a CPU. Under torchrun it is torchrun's number.",
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


@dataclass(frozen=True)
class Asked(RunOptions):
    """What does a collective cost on this machine?"""

    MULTIPLIES: ClassVar = False
    CPU_DEFAULTS: ClassVar = {"size_mb": (1, 10), "calls": 1, "warmup": 1, "steps": 10}
    timeout: float = 300.0


Options: Any = options_of(CollectiveCell, Asked)


def make_cells(options: Any) -> list[CollectiveCell]:
    """The grid; raises ValueError for a size that the ranks cannot divide, or that is too large."""
    cells = []
    for n, dtype, collective, size_mb in itertools.product(
        options.world_size, options.dtype, options.collective, options.size_mb
    ):
        parts = int(size_mb * 1e6) // (n * _ALIGNMENT) if 0 < size_mb <= _MOST_MB else 0
        if parts < 1:
            raise ValueError(f"--size-mb must lie between {n * _ALIGNMENT / 1e6:g} and {_MOST_MB}, got {size_mb:g}")
        own = {"world_size": n, "dtype": dtype, "collective": collective, "size_mb": size_mb}
        cells.append(cell_of(CollectiveCell, options, **own, total_bytes=parts * n * _ALIGNMENT))
    return cells


def measure(cell: CollectiveCell, rank: Rank) -> list[Metric]:
    """Time one collective on all ranks, then check every element of its result."""
    import torch

    from cs336_systems.distributed.collectives import Exchange
    from cs336_systems.harness.clock import time_phases_of_ranks
    from cs336_systems.harness.record import Metric

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[cell.dtype]
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


_SETTINGS = ("gpu", "device", "variant", "world_size", "dtype", "collective", "size_mb", "calls")
_WORLD = ["gpu", "host", "variant", "world_size"]
"""Columns within which one link must explain every time."""


def fit_links(rows: pd.DataFrame) -> dict[tuple[str, str, str, int], Link]:
    """The link of each world (gpu, host, backend, ranks) whose rows suffice to fit one.

    Args:
        rows: of ``benchmark_collectives.py``, the newest of each cell counts.
    """
    from cs336_systems.harness.runs import newest

    times = newest(rows, [*_SETTINGS, "host"])
    links = {}
    for _, world in times[times["metric"] == "time"].groupby(_WORLD, sort=False):
        points = [(_cost(line), line["median"] / 1e3) for _, line in world.iterrows()]
        try:
            links[_world(world.iloc[0])] = fit(points)
        except ValueError:  # a world of one, or of one size: nothing to fit
            continue
    return links


def collectives_table(rows: pd.DataFrame) -> Table:
    """One line per cell: time with its spread, the bandwidths, the ring's prediction, wrong elements, status."""
    links = fit_links(rows)

    def ring_ms(line: Line) -> float | None:
        link = links.get(_world(line.last))
        return 1e3 * link.seconds(_cost(line.last)) if link and "time" in line.metrics else None

    def over_ring(line: Line) -> float | None:
        return line.metrics["time"]["median"] / ring if (ring := ring_ms(line)) else None

    table = ResultTable(
        settings=_SETTINGS,
        always=("collective",),
        labels={"variant": "backend", "world_size": "ranks", "size_mb": "MB"},
        columns=(
            Column("time ms", "time", spread=True, rank=MAIN),
            Column("algbw GB/s", "algbw", rank=2),
            Column("busbw GB/s", "busbw"),
            Column("% of link", _link_percent, ".0f", note="busbw over the datasheet rate of one direction"),
            Column("ring ms", ring_ms, rank=2),
            Column("time / ring", over_ring, ".2f"),
            Column("wrong", "wrong_elements", ".0f", note="elements that are not the exact sum or copy", rank=2),
        ),
    ).of(rows)
    fitted = "; ".join(
        f"{world_size} ranks: {digits(link.alpha_s * 1e6)} µs per message, {_bandwidth(link)}"
        for (_, _, _, world_size), link in links.items()
    )
    return (
        replace(table, caption=f"{table.caption}. Ring fitted to all times of a world: {fitted}.") if fitted else table
    )


def _link_percent(line: Line) -> float | None:
    hardware, bus = find_hardware(line.last["gpu"]), line.median("busbw")
    return 1e11 * bus / hardware.link_bytes_per_s if bus and hardware and hardware.link_bytes_per_s else None


def _bandwidth(link: Link) -> str:
    if math.isinf(link.bytes_per_s):
        return "times that do not grow with the bytes (too few or too noisy points for a bandwidth)"
    return f"{digits(link.bytes_per_s / 1e9)} GB/s"


def collectives_figure(rows: pd.DataFrame) -> Figure | None:
    """Time (left; thin grey: the fitted ring) and busbw (right) against size.

    One line per collective (colour) and world (marker and dash). Of several dtypes the one with most points is drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter

    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import OKABE_ITO, WITH_COMMAS, dress

    links = fit_links(rows)
    rows = newest(rows, [*_SETTINGS, "host"])
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return None
    first = rows.iloc[-1]
    rows = rows[(rows["dtype"] == rows["dtype"].mode().iloc[0]) & (rows["variant"] == first["variant"])]
    rows = rows[(rows["gpu"] == first["gpu"]) & (rows["host"] == first["host"])]
    colours = {
        name: colour for name, colour in zip(COLLECTIVES, OKABE_ITO, strict=False) if name in set(rows["collective"])
    }
    shapes = zip("osD^v", ("-", "--", ":", "-.", "-"), strict=True)
    styles: dict[Any, Any] = {
        n: {"marker": marker, "linestyle": dash, "markersize": 5, "linewidth": 1.5}
        for n, (marker, dash) in zip(sorted(rows["world_size"].unique()), itertools.cycle(shapes), strict=False)
    }
    entries = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    entries += [Line2D([], [], color="grey", label=f"{n} ranks", **style) for n, style in styles.items()]
    grey: dict[str, Any] = {"color": "0.6", "linewidth": 0.8}
    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, bus_axes = figure.subplots(1, 2)
    for (collective, world_size), cells in rows.sort_values("total_bytes").groupby(["collective", "world_size"]):
        for axes, metric in ((time_axes, "time"), (bus_axes, "busbw")):
            line = cells[cells["metric"] == metric]
            spread = [line["median"] - line["p10"], line["p90"] - line["median"]]
            how = styles[world_size] | {"color": colours[str(collective)], "capsize": 2}
            axes.errorbar(line["total_bytes"] / 1e6, line["median"], yerr=spread, **how)
        if link := links.get(_world(cells.iloc[0])):
            line = cells[cells["metric"] == "time"]
            ring_ms = [1e3 * link.seconds(_cost(cell)) for _, cell in line.iterrows()]
            time_axes.plot(line["total_bytes"] / 1e6, ring_ms, zorder=1, **grey)
    if links.keys() & {_world(row) for _, row in rows.iterrows()}:
        entries.append(Line2D([], [], label="ring, fitted", **grey))
    sizes = sorted(rows["size_mb"].unique())
    labels = {time_axes: "time, ms (median, bar p10 to p90)", bus_axes: "busbw, GB/s (as nccl-tests)"}
    for axes, label in labels.items():
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("total size, MB")
        axes.set_ylabel(label)
        dress(axes)
    time_axes.set_yscale("log")
    time_axes.yaxis.set_major_formatter(WITH_COMMAS)
    bus_axes.set_ylim(bottom=0)
    hardware = find_hardware(first["gpu"])
    if hardware and hardware.link_bytes_per_s:
        height = hardware.link_bytes_per_s / 1e9
        bus_axes.axhline(height, color="0.3", linewidth=1)
        bus_axes.annotate("link, datasheet", (0.02, height), ("axes fraction", "data"), va="bottom")
    figure.legend(handles=entries, loc="outside right center", frameon=False, fontsize=9)
    where = first["gpu"] or first["host"]
    figure.suptitle(f"Collectives on {where}: {first['variant']}, {rows['dtype'].iloc[0]}", fontsize=11)
    return figure


def _world(row: pd.Series) -> tuple[str, str, str, int]:
    return str(row["gpu"]), str(row["host"]), str(row["variant"]), int(row["world_size"])


def _cost(row: pd.Series) -> RingCost:
    return cost(row["collective"], int(row["world_size"]), int(row["total_bytes"]))


def present(outcomes: list[Outcome], options: Any, csv: Path | None) -> int:
    """Shows the table and draws the figure; 1 if an element was wrong."""
    presented(collectives_table, {"": collectives_figure})(outcomes, options, csv)
    wrong = [str(outcome.cell) for outcome in outcomes if outcome.median("wrong_elements")]
    if wrong:
        print(f"{EXPERIMENT.name}: wrong elements in {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def default_worlds(device: str) -> tuple[int, ...]:
    """2, 4 and 6 GPUs as far as there are any; two ranks on a CPU."""
    import torch

    gpus = tuple(n for n in (2, 4, 6) if n <= torch.cuda.device_count()) or (1,)
    return gpus if device == "cuda" else (2,)


EXPERIMENT = Experiment(
    "benchmark_collectives",
    CollectiveCell,
    make_cells,
    one_stage(measure),
    present,
    ("time", "algbw", "busbw", "wrong_elements"),
    options=Options,
    default_worlds=default_worlds,
)
