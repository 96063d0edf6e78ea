"""Collectives beside the ring: a table and a figure from the rows of ``benchmark_collectives.py``, and nothing else.

One link, a latency and a bandwidth, is fitted to all times of a world (``costs.communication.fit``), so that the
prediction in each line is not of that line alone: where it is off, the collective is not the ring that the model has.
"""

import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from cs336_systems.costs.communication import COLLECTIVES, Link, RingCost, cost, fit
from cs336_systems.hardware import find_hardware
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.tables import Table, digits, settings_split

_SETTINGS = ["gpu", "device", "variant", "world_size", "dtype", "collective", "size_mb", "calls"]
_LABELS = {"variant": "backend", "world_size": "ranks", "size_mb": "MB"}
_WORLD = ["gpu", "host", "variant", "world_size"]
"""Columns within which one link must explain every time."""

_MARKERS = "osD^v"
_DASHES = ("-", "--", ":", "-.")


def fit_links(rows: pd.DataFrame) -> dict[tuple[str, str, str, int], Link]:
    """The link of each world (gpu, host, backend, ranks) whose rows suffice to fit one.

    Args:
        rows: of ``benchmark_collectives.py``, the newest of each cell counts.
    """
    times = _newest(rows)
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
    rows = _newest(rows)
    links = fit_links(rows)
    lines = []
    for _, cell in rows.groupby(_SETTINGS, sort=False, dropna=False):
        first = cell.iloc[0]
        metrics = {row["metric"]: row for _, row in cell.iterrows() if row["metric"]}
        settings = {column: first[column] for column in _SETTINGS} | {"size_mb": f"{first['size_mb']:g}"}
        lines.append(settings | _line(metrics, first, links.get(_world(first))))
    frame = pd.DataFrame(lines)
    caption, varying = settings_split(frame, _SETTINGS, always="collective")
    fitted = "; ".join(
        f"{world_size} ranks: {digits(link.alpha_s * 1e6)} µs per message, {_bandwidth(link)}"
        for (_, _, _, world_size), link in links.items()
    )
    caption += f". Ring fitted to all times of a world: {fitted}." if fitted else ""
    shown = frame[varying + [column for column in frame.columns if column not in _SETTINGS]]
    return Table(caption, shown.rename(columns=_LABELS))


def _bandwidth(link: Link) -> str:
    if math.isinf(link.bytes_per_s):
        return "times that do not grow with the bytes (too few or too noisy points for a bandwidth)"
    return f"{digits(link.bytes_per_s / 1e9)} GB/s"


def _line(metrics: dict[str, pd.Series], first: pd.Series, link: Link | None) -> dict[str, str]:
    if "time" not in metrics:
        names = ("time ms", "algbw GB/s", "busbw GB/s", "% of link", "ring ms", "time / ring", "wrong")
        return dict.fromkeys(names, "–") | {"status": f"{first['status']}: {first['message']}"}
    time, predicted = metrics["time"], link.seconds(_cost(first)) * 1e3 if link else None
    hardware = find_hardware(first["gpu"])
    limit = hardware.link_bytes_per_s if hardware else None
    bus = metrics["busbw"]["median"]
    return {
        "time ms": f"{digits(time['median'])} ({digits(time['p10'])}–{digits(time['p90'])})",
        "algbw GB/s": digits(metrics["algbw"]["median"]),
        "busbw GB/s": digits(bus),
        "% of link": f"{100 * bus * 1e9 / limit:.0f}" if limit else "–",
        "ring ms": digits(predicted) if predicted else "–",
        "time / ring": f"{time['median'] / predicted:.2f}" if predicted else "–",
        "wrong": f"{metrics['wrong_elements']['median']:.0f}",
        "status": first["status"],
    }


def draw_collectives(rows: pd.DataFrame, path: Path) -> bool:
    """Time (left; thin grey: the fitted ring) and busbw (right) against size; returns whether it drew.

    One line per collective (colour) and world (marker and dash). Of several dtypes the one with most points is drawn.
    """
    rows = _newest(rows)
    rows = rows[rows["status"] == "ok"]
    if rows.empty:
        return False
    first = rows.iloc[-1]
    rows = rows[(rows["dtype"] == rows["dtype"].mode().iloc[0]) & (rows["variant"] == first["variant"])]
    rows = rows[(rows["gpu"] == first["gpu"]) & (rows["host"] == first["host"])]
    links = fit_links(rows)
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
    time_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    _label(bus_axes, sorted(rows["size_mb"].unique()), "busbw, GB/s (as nccl-tests)")
    bus_axes.set_ylim(bottom=0)
    hardware = find_hardware(first["gpu"])
    if hardware and hardware.link_bytes_per_s:
        bus_axes.axhline(hardware.link_bytes_per_s / 1e9, color="0.3", linewidth=1)
        bus_axes.annotate(
            "link, datasheet", (0.02, hardware.link_bytes_per_s / 1e9), ("axes fraction", "data"), va="bottom"
        )
    figure.legend(handles=_legend(rows, worlds, bool(links)), loc="outside right center", frameon=False, fontsize=9)
    where = first["gpu"] or first["host"]
    figure.suptitle(f"Collectives on {where}: {first['variant']}, {rows['dtype'].iloc[0]}", fontsize=11)
    figure.savefig(path, dpi=150)
    return True


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
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(rows: pd.DataFrame, worlds: list[int], fitted: bool) -> list[Line2D]:
    """One entry per collective (colour), per world (marker and dash), and for the ring."""
    present = [name for name in COLLECTIVES if (rows["collective"] == name).any()]
    entries = [Line2D([], [], color=OKABE_ITO[COLLECTIVES.index(name)], label=name) for name in present]
    for i, world_size in enumerate(worlds):
        style = _style("all_reduce", i) | {"color": "grey", "label": f"{world_size} ranks"}
        entries.append(Line2D([], [], **style))  # type: ignore[arg-type]
    return entries + ([Line2D([], [], color="0.6", linewidth=0.8, label="ring, fitted")] if fitted else [])


def _newest(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each cell's last run."""
    return rows.drop_duplicates([*_SETTINGS, "host", "metric"], keep="last")


def _world(row: pd.Series) -> tuple[str, str, str, int]:
    return str(row["gpu"]), str(row["host"]), str(row["variant"]), int(row["world_size"])


def _cost(row: pd.Series) -> RingCost:
    return cost(row["collective"], int(row["world_size"]), int(row["total_bytes"]))
