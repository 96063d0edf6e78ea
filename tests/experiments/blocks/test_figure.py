"""The picture of time against kept memory: a panel for each shape, a point for each way."""

import pandas as pd

from cs336_systems.experiments.blocks.figure import kept_figure
from cs336_systems.experiments.blocks.table import BLOCK_TABLE
from cs336_systems.harness.record import Metric, parse_samples
from tests.report.rows import make_cell, ms

SHAPE = {"size": "llama3-8b", "batch_size": 2, "context_length": 8192, "dtype": "bf16", "attention": "hopper"}


def cell(how, step, kept, **values):
    settings = SHAPE | {"gpu": "NVIDIA H200", "device": "cuda", "layers": 1, "repeat": 0, "commit": "abc"} | values
    return make_cell(ms("step", step), Metric("kept", "GiB", [kept]), how=how, **settings)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def test_a_point_for_each_way_and_time_by_block():
    rows = frame(
        cell("compiled", 42.0, 4.0),
        cell("products", 40.0, 2.5),
        cell("input", 50.0, 0.5),
        cell("compiled", 41.0, 4.0, attention="sdpa-cudnn"),
        cell("compiled", 240.0, 4.0, size="leaderboard-8b", layers=6),
    )
    llama, leaderboard = (axes for axes in kept_figure(rows).axes if axes.get_visible())
    written_out, reference = llama.get_lines()
    assert list(zip(*written_out.get_data(), strict=True)) == [(0.5, 50.0), (2.5, 40.0)]
    assert list(zip(*reference.get_data(), strict=True)) == [(4.0, 42.0)]
    assert {text.get_text() for text in llama.texts} == {"compiled", "products", "input"}
    assert list(leaderboard.get_lines()[1].get_data()[1]) == [40.0]


def test_axes_begin_at_zero_and_every_point_lies_within():
    rows = frame(cell("compiled", 42.0, 4.0), cell("products", 40.0, 2.5), cell("input", 50.0, 0.5))
    (axes,) = (axes for axes in kept_figure(rows).axes if axes.get_visible())
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert left == bottom == 0 and right > 4.0 and top > 50.0


def test_without_kept_memory_there_is_no_picture():
    assert kept_figure(frame(make_cell(ms("step", 1.0), how="input", layers=1, **SHAPE))) is None


def test_ratios_in_the_table_are_of_one_turn():
    turns = [
        *(cell("compiled", 40.0, 4.0, repeat=0), cell("products", 38.0, 2.5, repeat=0)),
        *(cell("products", 44.0, 2.5, repeat=1), cell("compiled", 44.0, 4.0, repeat=1)),
    ]
    table = BLOCK_TABLE.of(frame(*turns)).frame.set_index("block")
    assert table["/ compiled"].to_dict() == {"compiled": "1.000", "products": "0.975 (0.950–1.000)"}
    assert table.loc["products", "kept GiB"] == "2.50"
