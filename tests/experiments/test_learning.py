"""``benchmark_learning``: its grid, its rows on a CPU, where fp8 is emulated, and what they say of losses by seed."""

from dataclasses import replace

import pandas as pd
import pytest

from cs336_systems.experiments.learning import (
    DEFAULT_DATA,
    EXPERIMENT,
    LEARNING_TABLE,
    Options,
    by_seed,
    loss_deviations,
    loss_figure,
    make_cells,
    off_percent,
)
from cs336_systems.harness.record import Metric, parse_samples, read_rows
from tests.pretraining.trained import write_dataset
from tests.report.rows import make_cell

TINY = replace(
    Options.default("cpu"), steps=6, warmup=2, seeds=2, context_length=16, batch_size=4, total_batch_tokens=128
)
SHAPE = {"size": "qwen-100m", "device": "cuda", "gpu": "NVIDIA H200", "argv": "x", "commit": "abc"}


def test_recipes_are_interleaved_in_rounds_of_one_seed_each():
    cells = make_cells(replace(TINY, seed=5, recipe=("e4m3-e5m2", "e4m3-row")))
    found = [(cell.recipe, cell.seed, cell.repeat) for cell in cells]
    assert found == [("e4m3-e5m2", 5, 0), ("e4m3-row", 5, 0), ("e4m3-e5m2", 6, 1), ("e4m3-row", 6, 1)]
    asked = [(one.matmul_dtype, one.gradient_dtype, one.scaling) for one in (cell.train_options for cell in cells[:2])]
    assert asked == [("e4m3", "e5m2", "tensor"), ("e4m3", "e4m3", "row")]


def test_what_cannot_be_asked_is_refused():
    for name, value in {"size": "tinny", "warmup": 6, "total_batch_tokens": 100, "keep": "autograd"}.items():
        with pytest.raises(ValueError, match=str(value)):
            make_cells(replace(TINY, **{name: value}))


def test_data_are_looked_at_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert EXPERIMENT.run(replace(TINY, data="nowhere")) == 2
    assert "nowhere" in capsys.readouterr().err
    write_dataset(tmp_path / "whole", n_evaluation=None)
    assert EXPERIMENT.run(replace(TINY, data="whole")) == 2
    assert "whole holds out nothing" in capsys.readouterr().err
    made = "cs336_systems.pretraining.preparation.default_data"
    monkeypatch.setattr(made, lambda: write_dataset(tmp_path / DEFAULT_DATA))
    (stage,) = EXPERIMENT.stages(TINY, make_cells(TINY), [])
    assert len(stage.cells) == 4


@pytest.mark.slow
def test_runs_of_one_seed_learn_the_same_tokens_whatever_multiplies(tmp_path, capsys):
    data = write_dataset(tmp_path / "data", 4000, 200)
    assert EXPERIMENT.run(replace(TINY, data=str(data), out=tmp_path)) == 0
    rows = read_rows(tmp_path / "benchmark_learning.csv")
    losses = {key: each.iloc[0] for key, each in rows[rows["metric"] == "loss"].groupby(["recipe", "seed"])["samples"]}
    assert set(losses) == {("stored", 0), ("stored", 1), ("e4m3", 0), ("e4m3", 1)}
    assert all(len(each) == 6 for each in losses.values())
    for seed in range(2):
        assert losses["e4m3", seed] == pytest.approx(losses["stored", seed], rel=0.02)
        assert losses["e4m3", seed] != losses["stored", seed]
    assert losses["stored", 0] != losses["stored", 1]
    assert set(rows[rows["metric"] == "learned_tokens"]["median"]) == {6 * 128}
    least = rows[rows["metric"] == "least_cosine"].groupby("recipe")["median"].min()
    assert least["stored"] > 0.999999
    assert 0.98 < least["e4m3"] < 0.9999
    lines = {line.settings["recipe"]: line for line in LEARNING_TABLE.lines(rows)}
    held_out = [by_seed(lines[recipe], "evaluation_loss") for recipe in ("e4m3", "stored")]
    assert off_percent(lines["e4m3"]).tolist() == [100 * (held_out[0][s] / held_out[1][s] - 1) for s in range(2)]
    assert "held-out loss" in capsys.readouterr().out


def cell(recipe, seed, held_out, rate, cosine=0.99):
    losses = [(each + seed) * (1.01 if recipe == "e4m3" else 1) for each in (4.0, 3.0)]
    found = {"tokens_per_s": [rate], "evaluation_loss": [held_out], "least_cosine": [cosine], "loss": losses}
    metrics = [Metric(name, "", samples) for name, samples in found.items()]
    return make_cell(*metrics, recipe=recipe, seed=seed, repeat=seed, **SHAPE)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def test_losses_are_compared_by_seed_over_the_speed():
    rows = frame(
        *(cell("stored", 0, 2.0, 100.0), cell("e4m3", 0, 2.02, 120.0), cell("e4m3-row", 0, 1.99, 90.0)),
        *(cell("stored", 1, 2.5, 100.0), cell("e4m3", 1, 2.5, 120.0, 0.98), cell("e4m3-row", 2, 2.5, 90.0)),
    )
    every, one = loss_deviations(rows), loss_deviations(rows, "e4m3")
    assert (every.n, every.n_above, one.n, one.n_above) == (3, 1, 2, 1)
    assert (one.mean, one.error, one.least, one.largest) == pytest.approx((0.5, 0.5, 0.0, 1.0))
    assert (every.mean, every.least) == pytest.approx((0.5 / 3, -0.5))
    with pytest.raises(ValueError, match="e4m3-block"):
        loss_deviations(rows, "e4m3-block")
    shown = LEARNING_TABLE.of(rows).frame.set_index("recipe")
    assert (shown.loc["e4m3", "least cosine"], shown.loc["e4m3", "x"]) == ("0.9800", "1.200")

    beside, over_steps = loss_figure(rows[rows["recipe"] != "e4m3-row"]).axes
    stored, dots, bar = beside.get_lines()
    assert [list(axis) for axis in stored.get_data()] == [[1], [0]]
    assert [list(axis) for axis in dots.get_data()] == [[1.2, 1.2], pytest.approx([1.0, 0.0])]
    assert [list(axis) for axis in bar.get_data()] == [[1.2], pytest.approx([0.5])]
    assert [line.get_ydata().tolist() for line in over_steps.get_lines()] == [pytest.approx([1.0, 1.0])] * 2
    assert loss_figure(rows[rows["recipe"] == "stored"]) is None
    assert loss_figure(rows[rows["recipe"] != "stored"]) is None
