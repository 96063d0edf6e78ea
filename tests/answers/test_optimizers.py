"""Runs by several optimizers: after which share of AdamW's steps Muon is at its loss."""

import pytest

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.figures import figures
from cs336_systems.answers.optimizers import optimizers_figure, optimizers_table, share_of_steps
from cs336_systems.pretraining.run_records import Evaluation, Session
from tests.pretraining.runs import write


@pytest.fixture
def runs(tmp_path):
    """Held-out losses after every tenth step of each run, committed as an H100's."""
    losses = {
        "adamw-40-0.001": [6.0, 5.0, 4.5, 4.2, 4.1],
        "adamw-40-0.002": [6.0, 4.9, 4.3, 3.9, 4.0],  # the lowest at its end, though not on its way
        "muon-40-0.002": [6.0, 4.8, 4.4, 4.2, 4.05],
        "muon-30-0.01": [6.0, 4.6, 4.1, 3.98],
        "muon-20-0.01": [6.0, 4.6, 4.02],
    }
    for name, found in losses.items():
        optimizer, steps, rate = name.split("-")
        options = {"optimizer": "fused" if optimizer == "adamw" else optimizer, "learning_rate": float(rate)}
        evaluations = [Evaluation(10 * i, loss, 1000, 0.1, {}) for i, loss in enumerate(found)]
        folder = tmp_path / "runs" / "h100" / name
        folder.mkdir(parents=True)
        write(folder / "log.jsonl", Session(options, {}, int(steps)), *evaluations)
    return Committed(tmp_path, "h200")


def test_muon_is_measured_by_the_steps_of_adamws_best_run(runs):
    found = runs.runs("adamw-", "muon-", machine="h100")
    assert share_of_steps(found) == 0.75
    frame = optimizers_table(found).frame
    assert frame["optimizer"].tolist() == ["AdamW", "AdamW", "Muon", "Muon", "Muon"]
    assert frame["reached AdamW's best after"].tolist() == ["–", "30 steps", "–", "30 steps", "–"]
    without = {name: run for name, run in found.items() if name != "muon-30-0.01"}
    assert share_of_steps(without) is None
    with pytest.raises(ValueError, match="no run of AdamW among muon-20"):
        share_of_steps(runs.runs("muon-20", machine="h100"))


def test_the_picture_has_every_run_and_is_missing_without_one(runs, tmp_path):
    found = runs.runs("adamw-", "muon-", machine="h100")
    (axes,) = optimizers_figure(tuple(found), *found.values()).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [4, 4, 2, 3, 4, 2]  # the last is the loss to be reached
    assert set(axes.lines[-1].get_ydata()) == {4.0}
    drawing = figures(runs)["h100_optimizers.png"]
    before = drawing.source()
    log = tmp_path / "runs" / "h100" / "muon-20-0.01" / "log.jsonl"
    log.write_text(log.read_text().replace("4.02", "4.03"))
    assert drawing.source() != before
    with pytest.raises(NotMeasured):
        figures(Committed(tmp_path / "nowhere", "h200"))["h100_optimizers.png"].source()
