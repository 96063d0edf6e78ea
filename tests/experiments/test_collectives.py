"""The table and figure of collectives from hand-made rows whose times a known link has made."""

import pandas as pd
import pytest

from cs336_systems.costs.communication import COLLECTIVES, Link, busbw, cost
from cs336_systems.experiments.collectives import (
    collectives_figure,
    collectives_table,
    fit_links,
)
from cs336_systems.harness.record import Metric, parse_samples
from cs336_systems.report.figures import save

LINK = Link(5e-6, 1 / 300e9)
SHARED = {"gpu": "NVIDIA H200", "host": "a host", "device": "cuda", "variant": "nccl", "calls": 5, "message": ""}


def rows_of(collective, world_size, size_mb, *, slower=1.0, dtype="fp32"):
    total = int(size_mb * 1e6)
    seconds = LINK.seconds(cost(collective, world_size, total)) * slower
    shared = SHARED | {"collective": collective, "world_size": world_size, "size_mb": size_mb, "total_bytes": total}
    shared |= {"dtype": dtype, "status": "ok"}
    bus = busbw(collective, world_size, total, seconds) / 1e9
    metrics = [
        Metric("time", "ms", [1e3 * seconds]),
        Metric("algbw", "GB/s", [total / seconds / 1e9]),
        Metric("busbw", "GB/s", [bus]),
        Metric("wrong_elements", "", [0]),
    ]
    return [shared | metric.statistics() for metric in metrics]


def frame(*cells):
    return parse_samples(pd.DataFrame([row for cell in cells for row in cell]))


@pytest.fixture
def rows():
    """Two worlds of all collectives and sizes, after an older and slower run of one cell, and a cell that failed."""
    old = rows_of("all_reduce", 2, 1.0, slower=7)
    cells = [rows_of(name, n, size) for n in (2, 4) for name in COLLECTIVES for size in (1.0, 10.0, 1000.0)]
    failed = {name: value for name, value in cells[-1][0].items() if name not in ("metric", "median", "samples")}
    return frame(old, *cells, [failed | {"dtype": "bf16", "status": "oom", "message": "no room", "metric": ""}])


def test_the_fit_is_of_the_newest_times_and_one_link_per_world(rows):
    links = fit_links(rows)
    assert list(links) == [("NVIDIA H200", "a host", "nccl", 2), ("NVIDIA H200", "a host", "nccl", 4)]
    for link in links.values():
        assert link.alpha_s == pytest.approx(LINK.alpha_s, rel=1e-4)
        assert link.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-4)


def test_without_two_points_or_with_times_that_do_not_grow_there_is_no_bandwidth():
    small, large = rows_of("all_reduce", 2, 0.01), rows_of("all_reduce", 2, 1.0)
    large[0] |= {"median": small[0]["median"] / 2}
    assert "2 ranks: " in (caption := collectives_table(frame(small, large)).caption)
    assert "times that do not grow with the bytes" in caption
    alone = collectives_table(frame(rows_of("all_reduce", 2, 1.0)))
    assert alone.frame.iloc[0]["time / ring"] == "–", "nothing to fit"


def test_the_table_has_a_line_per_cell(rows):
    table = collectives_table(rows)
    assert "2 ranks: 5.00 µs per message, 300 GB/s; 4 ranks: 5.00 µs per message, 300 GB/s" in table.caption
    assert "gpu NVIDIA H200, device cuda, backend nccl, calls 5" in table.caption
    lines = table.frame
    assert len(lines) == 2 * 5 * 3 + 1
    assert set(lines["time / ring"]) == {"1.00", "–"}
    large = lines[(lines["collective"] == "all_reduce") & (lines["ranks"] == 4) & (lines["MB"] == "1000")].iloc[0]
    assert large["algbw GB/s"] == "199"
    assert large["busbw GB/s"] == "298"
    assert large["% of link"] == "66"
    assert lines.iloc[-1]["status"] == "oom: no room"
    assert lines.iloc[-1]["time ms"] == "–"


def test_each_collective_of_each_world_is_a_line_in_both_halves_beside_its_ring(rows, tmp_path):
    figure = collectives_figure(rows)
    time_axes, bus_axes = figure.axes
    for axes in figure.axes:
        assert len(axes.containers) == 2 * 5
        assert all(list(bars[0].get_xdata()) == [1, 10, 1000] for bars in axes.containers)
    rings = [line for line in time_axes.lines if line.get_color() == "0.6"]
    assert len(rings) == 2 * 5
    for bars, ring in zip(time_axes.containers, rings, strict=True):
        assert list(bars[0].get_ydata()) == pytest.approx(list(ring.get_ydata()), rel=1e-3), (
            "the newest, not the slow one"
        )
    assert time_axes.get_yscale() == time_axes.get_xscale() == "log"
    assert [text.get_text() for text in bus_axes.texts] == ["link, datasheet"]
    assert save(figure, tmp_path / "figure.png")
    assert not save(collectives_figure(rows[rows["status"] == "oom"]), tmp_path / "none.png")
