"""Tables that templates describe: quantities of cells, their ratios, how a cell ended, and parts of larger tables."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import NotMeasured, Rows
from cs336_systems.answers.pivot import MOST_LINES, part_of, pivot, quoted
from cs336_systems.report.tables import Table
from tests.report.rows import make_cell, make_frame, ms

CELLS = [
    make_cell(ms("step", 8.0, 12.0), ms("peak", 3.0), size="small", dtype="fp32"),
    make_cell(ms("step", 5.0), ms("peak", 2.0), size="small", dtype="bf16"),
    make_cell(ms("step", 40.0), ms("peak", 9.0), size="xl", dtype="fp32"),
    make_cell(status="oom", message="no", size="xl", dtype="bf16"),
]
ROWS = Rows(lambda: make_frame(*CELLS))
TIMES = {
    "fp32 ms": {"metric": "step", "dtype": "fp32"},
    "bf16 ms": {"metric": "step", "dtype": "bf16"},
    "ratio": {"ratio": ["fp32 ms", "bf16 ms"], "places": 1},
    "fp32 us": {"metric": "step", "dtype": "fp32", "scale": 1e3, "places": 0},
}


def test_lines_quantities_ratios_and_how_a_cell_ended():
    table = pivot(ROWS, ["size"], TIMES, "Two.")
    assert table.caption == "Two."
    assert table.frame.to_dict("records") == [
        {"size": "small", "fp32 ms": "10.0", "bf16 ms": "5.00", "ratio": "2.0", "fp32 us": "10,000"},
        {"size": "xl", "fp32 ms": "40.0", "bf16 ms": "oom", "ratio": "–", "fp32 us": "40,000"},
    ]


def test_a_spread_and_a_plain_metric():
    table = pivot(
        ROWS.where(dtype="fp32"), ["size", "dtype"], {"ms": {"metric": "step", "spread": True}, "GiB": "peak"}
    )
    assert table.frame["ms"].iloc[0] == "10.0 ± 2.83" and list(table.frame["GiB"]) == ["3.00", "9.00"]


def test_the_newest_run_of_a_cell_counts():
    runs = [make_cell(ms("step", time), argv=argv) for argv, time in (("a", 9.0), ("b", 1.0))]
    assert list(pivot(Rows(lambda: make_frame(*runs)), ["size"], {"ms": "step"}).frame["ms"]) == ["1.00"]


def test_several_cells_an_unknown_metric_and_no_rows_are_errors():
    with pytest.raises(ValueError, match="dtype"):
        pivot(ROWS, ["size"], {"ms": "step"})
    with pytest.raises(ValueError, match="'guess'"):
        pivot(ROWS, ["size"], {"ms": "guess"})
    with pytest.raises(NotMeasured):
        pivot(ROWS.where(size="10b"), ["size"], TIMES)


def test_part_of_a_table():
    table = Table("Many.", pd.DataFrame({"size": ["a", "b", "c"], "ms": ["1", "2", "3"], "n": [1, 2, 3]}))
    assert part_of(table, ["ms"], {"size": ["a", "c"]}).frame["ms"].to_list() == ["1", "3"]
    assert part_of(table, where={"n": 2}).frame["size"].to_list() == ["b"]
    assert quoted(table, "ms", {"size": "b", "n": 2}) == "2"
    with pytest.raises(ValueError, match="2 lines"):
        quoted(table, "ms", {"size": ["a", "b"]})
    long = Table("", pd.DataFrame({"n": range(MOST_LINES + 1)}))
    for wrong in (lambda: part_of(table, ["guess"]), lambda: part_of(table, where={"n": 9}), lambda: part_of(long)):
        with pytest.raises(ValueError):
            wrong()
