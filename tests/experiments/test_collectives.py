"""``benchmark_collectives``: two real ranks, its grid, and the table of times that a known link has made."""

import json
from dataclasses import replace

import pytest

from cs336_systems.costs.communication import COLLECTIVES, Link, busbw, cost
from cs336_systems.distributed.collectives import Exchange
from cs336_systems.experiments.collectives import CollectiveCell, collectives_table, measure
from cs336_systems.harness.record import read_rows
from tests.benchmarks.commands import cells_of, run
from tests.distributed.checks import on_ranks
from tests.report.rows import rows_of

LINK = Link(5e-6, 1 / 300e9)
FEW = COLLECTIVES[:2]


@pytest.mark.slow
def test_two_ranks_without_a_launcher(capsys, tmp_path):
    sizes = ["--size-mb", "0.01", "1", "--steps", "3", "--dtype", "bf16", "--out", tmp_path]
    code, out, err = run("benchmark_collectives", capsys, "--collective", "all_reduce", *sizes)
    assert code == 0, err
    assert "Ring fitted to all times of a world: 2 ranks:" in out
    line = json.loads(out.splitlines()[-1])
    assert line["ok"] == 2
    assert line["cells"][0]["cell"] == "all_reduce 0.01 MB bf16 on 2 ranks (gloo)"
    rows = read_rows(tmp_path / "benchmark_collectives.csv")
    assert set(rows["total_bytes"]) == {9984, 999936}
    assert (rows[rows["metric"] == "time"]["n"] == 3).all()
    assert (tmp_path / "benchmark_collectives.png").exists()


def measure_wrong(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "wrong_elements", lambda exchange: rank.rank * 3)
        cell = CollectiveCell(world_size=2, total_bytes=1024, steps=1, warmup=0)
        with pytest.raises(RuntimeError, match="3 elements of all_reduce"):
            measure(cell, rank)


def test_a_wrong_element_is_a_failure_on_every_rank():
    on_ranks(measure_wrong, 2)


def test_the_grid_of_a_machine():
    assert {cell.world_size for cell in cells_of("collectives")} == {2}
    cells = cells_of("collectives", "--world-size", "2", "3")
    assert len(cells) == 2 * 5 * 2
    assert all(cell.total_bytes % (cell.world_size * 128) == 0 for cell in cells)
    faults = {"--world-size 0": "got 0", "--size-mb 0.0001": "0.000256 .* 0.0001", "--size-mb 9000": "got 9000"}
    for line, message in faults.items():
        with pytest.raises(ValueError, match=message):
            cells_of("collectives", *line.split())


def timed(collective, world_size, size_mb, *, slower=1.0):
    """A cell, and what it measures where each takes as long as ``LINK`` says."""
    total = int(size_mb * 1e6)
    seconds = LINK.seconds(cost(collective, world_size, total)) * slower
    found = {"time": 1e3 * seconds, "algbw": total / seconds / 1e9}
    found |= {"busbw": busbw(collective, world_size, total, seconds) / 1e9}
    return CollectiveCell("cuda", world_size, "fp32", collective, size_mb, total), found


def frame(*measured):
    return rows_of(*zip(*measured, strict=True), gpu="NVIDIA H200")


@pytest.fixture
def rows():
    """Two worlds of all collectives and sizes, after an older and slower run of one cell, and a cell that failed."""
    old = timed("all_reduce", 2, 1.0, slower=7)
    measured = [timed(name, n, size) for n in (2, 4) for name in FEW for size in (1.0, 10.0, 1000.0)]
    return frame(old, *measured, (replace(old[0], dtype="bf16"), None))


def test_a_fit_needs_several_sizes_and_says_what_it_cannot_tell():
    small, large = timed("all_reduce", 2, 0.01), timed("all_reduce", 2, 1.0)
    large[1]["time"] = small[1]["time"] / 2
    assert "times that do not grow with the bytes" in collectives_table(frame(small, large)).caption
    alone = collectives_table(frame(timed("all_reduce", 2, 1.0)))
    assert alone.frame.iloc[0]["time / ring"] == "–", "nothing to fit"


@pytest.mark.slow
def test_the_table_has_a_line_per_cell(rows):
    table = collectives_table(rows)
    assert "2 ranks: 5.00 µs per message, 300 GB/s; 4 ranks: 5.00 µs per message, 300 GB/s" in table.caption
    lines = table.frame
    assert len(lines) == 2 * 2 * 3 + 1
    assert set(lines["time / ring"]) == {"1.00", "–"}, "of the newest times"
    large = lines[(lines["collective"] == "all_reduce") & (lines["ranks"] == 4) & (lines["MB"] == "1000")].iloc[0]
    assert (large["algbw GB/s"], large["busbw GB/s"], large["% of link"]) == ("199", "298", "66")
