"""``benchmark_learning``: its grid, and its rows on a CPU, where products are emulated."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.experiments.learning import experiment
from cs336_systems.experiments.learning.cells import Options, make_cells
from cs336_systems.experiments.learning.experiment import EXPERIMENT
from cs336_systems.experiments.learning.table import LEARNING_TABLE, by_seed, off_percent
from cs336_systems.harness.record import read_rows

from ...pretraining.trained import write_dataset

TINY = replace(
    Options.default("cpu"), steps=6, warmup=2, seeds=2, context_length=16, batch_size=4, total_batch_tokens=128
)


def test_recipes_take_turns_in_rounds_of_one_seed_each():
    cells = make_cells(replace(TINY, seed=5, recipe=("e4m3-e5m2", "e4m3-row")))
    assert [(cell.recipe, cell.seed, cell.repeat) for cell in cells] == [
        *(("e4m3-e5m2", 5, 0), ("e4m3-row", 5, 0)),
        *(("e4m3-e5m2", 6, 1), ("e4m3-row", 6, 1)),
    ]
    asked = [cell.train_options for cell in cells[:2]]
    assert [(one.matmul_dtype, one.gradient_dtype, one.scaling) for one in asked] == [
        ("e4m3", "e5m2", "tensor"),
        ("e4m3", "e4m3", "row"),
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"size": "tinny"}, "unknown model size 'tinny'"),
        ({"seeds": 0}, "--seeds must be positive, got 0"),
        ({"warmup": 6}, "--steps must be more than --warmup 6, got 6"),
        ({"total_batch_tokens": 100}, "--total-batch-tokens 100 is no multiple of 64"),
        ({"keep": "autograd"}, "matmul_dtype e4m3 with keep autograd"),
    ],
)
def test_what_cannot_be_asked_is_told(fault, message):
    with pytest.raises(ValueError, match=message):
        make_cells(replace(TINY, **fault))


def test_data_are_looked_at_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert EXPERIMENT.run(replace(TINY, data=Path("nowhere"))) == 2
    assert capsys.readouterr().err.endswith(
        "benchmark_learning: nowhere is no folder of scripts/tokenize_data.py: it has no dataset.json\n"
    )
    write_dataset(tmp_path / "whole", n_evaluation=None)
    assert EXPERIMENT.run(replace(TINY, data=Path("whole"))) == 2
    assert "whole holds out nothing to evaluate on\n" in capsys.readouterr().err
    monkeypatch.setattr(experiment, "default_data", lambda: write_dataset(tmp_path / Options.data))
    (stage,) = EXPERIMENT.stages(TINY, make_cells(TINY), [])
    assert len(stage.cells) == 4


@pytest.mark.slow
def test_runs_of_one_seed_learn_the_same_tokens_whatever_multiplies(tmp_path, capsys):
    data = write_dataset(tmp_path / "data", 4000, 200)
    assert EXPERIMENT.run(replace(TINY, data=data, out=tmp_path)) == 0
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
