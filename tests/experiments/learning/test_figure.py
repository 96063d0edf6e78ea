"""The picture of loss beside speed: dots for seeds, a bar for their mean, a curve for each recipe."""

import pandas as pd
import pytest

from cs336_systems.experiments.learning.figure import loss_figure
from cs336_systems.harness.record import Metric, parse_samples
from tests.report.rows import make_cell

SHAPE = {"size": "qwen-100m", "device": "cuda", "gpu": "NVIDIA H200", "argv": "x", "commit": "abc"}


def cell(recipe, seed, held_out, rate):
    metrics = Metric("tokens_per_s", "1/s", [rate]), Metric("evaluation_loss", "nats", [held_out])
    losses = Metric("loss", "nats", [4.0 + seed, 3.0 + seed])
    return make_cell(*metrics, losses, recipe=recipe, seed=seed, repeat=seed, **SHAPE)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def test_losses_are_compared_by_seed_over_the_speed():
    rows = frame(
        *(cell("stored", 0, 2.0, 100.0), cell("e4m3", 0, 2.02, 120.0)),
        *(cell("stored", 1, 2.5, 100.0), cell("e4m3", 1, 2.5, 120.0)),
    )
    beside, curves = loss_figure(rows).axes
    stored, _, dots, bar = beside.get_lines()
    assert stored.get_data()[1].tolist() == [0.0, 0.0]
    assert [list(axis) for axis in dots.get_data()] == [[1.2, 1.2], pytest.approx([1.0, 0.0])]
    assert [list(axis) for axis in bar.get_data()] == [[1.2], pytest.approx([0.5])]
    assert [line.get_ydata().tolist() for line in curves.get_lines()] == [[4.5, 3.5]] * 2
    assert [text.get_text() for text in beside.texts] == ["stored", "e4m3"]


def test_without_a_recipe_beside_stored_products_there_is_no_picture():
    assert loss_figure(frame(cell("stored", 0, 2.0, 100.0))) is None
    assert loss_figure(frame(cell("e4m3", 0, 2.0, 100.0), cell("e4m3-row", 0, 2.0, 100.0))) is None
