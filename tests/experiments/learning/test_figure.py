"""The picture of loss beside speed: dots for seeds, a bar for their mean, and how runs part."""

import pandas as pd
import pytest

from cs336_systems.experiments.learning.figure import loss_figure
from cs336_systems.experiments.learning.table import LEARNING_TABLE, loss_deviations
from cs336_systems.harness.record import Metric, parse_samples
from tests.report.rows import make_cell

SHAPE = {"size": "qwen-100m", "device": "cuda", "gpu": "NVIDIA H200", "argv": "x", "commit": "abc"}


def cell(recipe, seed, held_out, rate):
    metrics = Metric("tokens_per_s", "1/s", [rate]), Metric("evaluation_loss", "nats", [held_out])
    losses = Metric("loss", "nats", [(each + seed) * (1.01 if recipe == "e4m3" else 1) for each in (4.0, 3.0)])
    return make_cell(*metrics, losses, recipe=recipe, seed=seed, repeat=seed, **SHAPE)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def test_losses_are_compared_by_seed_over_the_speed():
    rows = frame(
        *(cell("stored", 0, 2.0, 100.0), cell("e4m3", 0, 2.02, 120.0)),
        *(cell("stored", 1, 2.5, 100.0), cell("e4m3", 1, 2.5, 120.0)),
    )
    beside, over_steps = loss_figure(rows).axes
    stored, dots, bar = beside.get_lines()
    assert [list(axis) for axis in stored.get_data()] == [[1], [0]]
    assert [list(axis) for axis in dots.get_data()] == [[1.2, 1.2], pytest.approx([1.0, 0.0])]
    assert [list(axis) for axis in bar.get_data()] == [[1.2], pytest.approx([0.5])]
    assert [text.get_text() for text in beside.texts] == ["stored", "e4m3"]
    assert [line.get_ydata().tolist() for line in over_steps.get_lines()] == [pytest.approx([1.0, 1.0])] * 2


def test_without_a_recipe_beside_stored_products_there_is_no_picture():
    assert loss_figure(frame(cell("stored", 0, 2.0, 100.0))) is None
    assert loss_figure(frame(cell("e4m3", 0, 2.0, 100.0), cell("e4m3-row", 0, 2.0, 100.0))) is None


def test_deviations_are_of_pairs_with_one_seed():
    rows = frame(
        *(cell("stored", 0, 2.0, 100.0), cell("e4m3", 0, 2.02, 120.0), cell("e4m3-row", 0, 1.99, 90.0)),
        *(cell("stored", 1, 2.5, 100.0), cell("e4m3", 1, 2.5, 120.0), cell("e4m3-row", 2, 2.5, 90.0)),
    )
    every, one = loss_deviations(rows), loss_deviations(rows, "e4m3")
    assert (every.n, every.n_above, one.n, one.n_above) == (3, 1, 2, 1)
    assert (one.mean, one.error, one.least, one.largest) == pytest.approx((0.5, 0.5, 0.0, 1.0))
    assert (every.mean, every.least) == pytest.approx((0.5 / 3, -0.5))
    with pytest.raises(ValueError, match="no run of e4m3-block stands beside one of stored products"):
        loss_deviations(rows, "e4m3-block")


def test_the_table_has_the_least_cosine_of_all_seeds_and_the_mean_of_their_means():
    cosines = {0: (0.99, 0.996), 1: (0.98, 0.998)}
    cells = [
        make_cell(
            Metric("least_cosine", "", [least]),
            Metric("mean_cosine", "", [mean]),
            recipe="e4m3",
            seed=seed,
            repeat=seed,
            **SHAPE,
        )
        for seed, (least, mean) in cosines.items()
    ]
    (line,) = LEARNING_TABLE.of(frame(*cells)).frame.to_dict("records")
    assert (line["least cosine"], line["mean cosine"]) == ("0.9800", "0.9970")
