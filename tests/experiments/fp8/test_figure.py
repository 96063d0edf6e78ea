"""The picture of time: a panel for the block and each product, a bar for each way, a piece for each phase."""

import pandas as pd

from cs336_systems.experiments.fp8.figure import time_figure
from cs336_systems.harness.record import parse_samples
from tests.report.rows import make_cell, ms

SHAPE = {"size": "llama3-8b", "batch_size": 2, "context_length": 8192, "device": "cuda", "gpu": "NVIDIA H200"}


def cell(product, how, **phases):
    times = (ms(name, value) for name, value in phases.items())
    return make_cell(*times, part="product" if product else "block", product=product, how=how, **SHAPE)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def test_phases_stand_one_after_the_other_in_the_bar_of_their_way():
    quantized = {"quantize_x": 0.5, "forward": 1.0, "quantize_dy": 0.75, "backward": 2.0}
    rows = frame(
        *(cell("qkv", "e4m3", **quantized), cell("qkv", "compiled", forward=2.0, backward=4.0)),
        *(cell("down", "e4m3", **quantized), cell("", "e4m3", forward=9.0, backward=19.0)),
    )
    figure = time_figure(rows)
    block, qkv, down = figure.axes
    titles = [axes.get_title() for axes in (block, qkv, down)]
    assert titles == [f"{what}\nllama3-8b, 16,384 tokens" for what in ("block", "qkv", "down")]
    assert [label.get_text() for label in block.get_yticklabels()] == ["e4m3", "compiled"]
    pieces = [(bar.get_x(), bar.get_width()) for bar in qkv.patches]
    assert pieces[::2] == [(0.0, 1.0), (1.0, 2.0), (3.0, 0.5), (3.5, 0.75)]
    assert pieces[1::2] == [(0.0, 2.0), (2.0, 4.0), (6.0, 0.0), (6.0, 0.0)]
    assert [(bar.get_x(), bar.get_width()) for bar in block.patches] == [(0.0, 9.0), (9.0, 19.0)]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "backward", "quantize x", "quantize dy"]


def test_without_rows_there_is_no_picture():
    assert time_figure(frame(cell("", "e4m3", forward=9.0)).assign(status="error")) is None
