"""Published steps beside predictions: every figure has its row, and errors are those that the page tells of."""

import pytest

from cs336_systems.answers import training
from cs336_systems.answers.published import STEPS, Published, PublishedStep


def test_predictions_are_within_a_fifth_but_of_torchtitan():
    """Its H100s draw 500 W and its steps run compiled, by autograd: all six take a quarter to two thirds longer."""
    tables, summary = Published().answer()
    assert summary["steps"] == len(STEPS) == len(tables[0].frame) == 22
    errors = {step.name: step.predicted_s / step.seconds - 1 for step in STEPS}
    assert {name for name, error in errors.items() if abs(error) > 0.2} == {
        name for name in errors if name.startswith("torchtitan")
    }
    assert all(-0.4 < error < -0.2 for name, error in errors.items() if name.startswith("torchtitan"))
    assert summary["within 20 %"] == 16


def test_layouts_use_the_gpus_and_sequences_that_were_published():
    for step in STEPS:
        layout = step.layout
        assert layout.n_ranks == step.n_gpus
        assert layout.data * layout.micro_batch * layout.n_micro_batches == step.n_sequences


def test_rates_become_seconds(monkeypatch):
    step = PublishedStep("a step", "llama3-8b", 8, 16, {"zero": 3})
    for figure, seconds in (
        ("2.5 s", 2.5),
        ("8,192 tokens/s a GPU", 2.0),
        # 6 x (8.03e9 - 525e6 of the embedding) + 12 x 32 x 4096 x 8192 a token
        ("400 TFLOP/s a GPU", 2 * 8192 * 5.79e10 / 400e12),
    ):
        monkeypatch.setattr(training, "outside", lambda name, figure=figure: figure)
        assert step.seconds == pytest.approx(seconds, rel=1e-2)
    monkeypatch.setattr(training, "outside", lambda name: "3 furlongs")
    with pytest.raises(ValueError, match="'furlongs', which is no time"):
        _ = step.seconds
