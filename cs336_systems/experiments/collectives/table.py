"""Collectives against the ring: a table and a figure from the rows of ``benchmark_collectives.py``, and nothing else.

One link, a latency and a bandwidth, is fitted to all times of a world (``costs.communication.fit``), so that the
prediction in each line is not of that line alone: where it is off, the collective is not the ring that the model has.
"""

import math
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from cs336_systems.costs.communication import COLLECTIVES, Link, RingCost, cost, fit
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, WITH_COMMAS, dress
from cs336_systems.report.results import MAIN, Column, Line, ResultTable
from cs336_systems.report.tables import Table, digits

_SETTINGS = ("gpu", "device", "variant", "world_size", "dtype", "collective", "size_mb", "calls")
_WORLD = ["gpu", "host", "variant", "world_size"]
"""Columns within which one link must explain every time."""

_MARKERS = "osD^v"
_DASHES = ("-", "--", ":", "-.")


def fit_links(rows: pd.DataFrame) -> dict[tuple[str, str, str, int], Link]:
    """The link of each world (gpu, host, backend, ranks) whose rows suffice to fit one.

    Args:
        rows: of ``benchmark_collectives.py``, the newest of each cell counts.
    """
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
    links = fit_links(rows)
    rows = newest(rows, [*_SETTINGS, "host"])
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return None
    first = rows.iloc[-1]
    rows = rows[(rows["dtype"] == rows["dtype"].mode().iloc[0]) & (rows["variant"] == first["variant"])]
    rows = rows[(rows["gpu"] == first["gpu"]) & (rows["host"] == first["host"])]
    worlds = sorted(rows["world_size"].unique())
    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, bus_axes = figure.subplots(1, 2)
    for (collective, world_size), cells in rows.groupby(["collective", "world_size"], sort=False):
        style = _style(str(collective), worlds.index(world_size))
        for axes, metric in ((time_axes, "time"), (bus_axes, "busbw")):
            line = cells[cells["metric"] == metric].sort_values("total_bytes")
            spread = [line["median"] - line["p10"], line["p90"] - line["median"]]
            axes.errorbar(line["total_bytes"] / 1e6, line["median"], yerr=spread, capsize=2, **style)
        if link := links.get(_world(cells.iloc[0])):
            line = cells[cells["metric"] == "time"].sort_values("total_bytes")
            ring_ms = [1e3 * link.seconds(_cost(cell)) for _, cell in line.iterrows()]
            time_axes.plot(line["total_bytes"] / 1e6, ring_ms, color="0.6", linewidth=0.8, zorder=1)
    _label(time_axes, sorted(rows["size_mb"].unique()), "time, ms (median, bar p10 to p90)")
    time_axes.set_yscale("log")
    time_axes.yaxis.set_major_formatter(WITH_COMMAS)
    _label(bus_axes, sorted(rows["size_mb"].unique()), "busbw, GB/s (as nccl-tests)")
    bus_axes.set_ylim(bottom=0)
    hardware = find_hardware(first["gpu"])
    if hardware and hardware.link_bytes_per_s:
        bus_axes.axhline(hardware.link_bytes_per_s / 1e9, color="0.3", linewidth=1)
        bus_axes.annotate(
            "link, datasheet", (0.02, hardware.link_bytes_per_s / 1e9), ("axes fraction", "data"), va="bottom"
        )
    figure.legend(
        handles=_legend(rows, worlds, any(_world(row) in links for _, row in rows.iterrows())),
        loc="outside right center",
        frameon=False,
        fontsize=9,
    )
    where = first["gpu"] or first["host"]
    figure.suptitle(f"Collectives on {where}: {first['variant']}, {rows['dtype'].iloc[0]}", fontsize=11)
    return figure


def _style(collective: str, world: int) -> dict[str, object]:
    return {
        "color": OKABE_ITO[COLLECTIVES.index(collective)],
        "marker": _MARKERS[world % len(_MARKERS)],
        "linestyle": _DASHES[world % len(_DASHES)],
        "markersize": 5,
        "linewidth": 1.5,
    }


def _label(axes: Axes, sizes: list[float], y: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("total size, MB")
    axes.set_ylabel(y)
    dress(axes)


def _legend(rows: pd.DataFrame, worlds: list[int], fitted: bool) -> list[Line2D]:
    """One entry per collective (colour), per world (marker and dash), and for the ring."""
    present = [name for name in COLLECTIVES if (rows["collective"] == name).any()]
    entries = [Line2D([], [], color=OKABE_ITO[COLLECTIVES.index(name)], label=name) for name in present]
    for i, world_size in enumerate(worlds):
        style = _style("all_reduce", i) | {"color": "grey", "label": f"{world_size} ranks"}
        entries.append(Line2D([], [], **style))  # type: ignore[arg-type]
    return entries + ([Line2D([], [], color="0.6", linewidth=0.8, label="ring, fitted")] if fitted else [])


def _world(row: pd.Series) -> tuple[str, str, str, int]:
    return str(row["gpu"]), str(row["host"]), str(row["variant"]), int(row["world_size"])


def _cost(row: pd.Series) -> RingCost:
    return cost(row["collective"], int(row["world_size"]), int(row["total_bytes"]))
