"""Which numbers go to TensorBoard and to Weights & Biases, by stand-ins for both."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from cs336_systems.pretraining.run_log import RunLog, TensorBoard, WeightsAndBiases
from cs336_systems.pretraining.run_records import Evaluation, GpuState, LoggedStep
from tests.pretraining.runs import opening

RECORDS = [
    *opening(9, first_step=4),
    LoggedStep(4, 0.5, 1000, 2.5, 1.5, 3e-4),
    Evaluation(5, 2.25, 100, 0.1),
    GpuState(4, 1980.0, None, None, 50.0, "", None),
]
OF_STEP = {"train/loss": 2.5, "train/norm": 1.5, "train/learning_rate": 3e-4, "train/seconds": 0.5}
OF_STEP |= {"train/tokens_per_s": 2000.0, "gpu/sm_mhz": 1980.0, "gpu/temperature_c": 50.0}
EXPECTED = sorted([*((4, name, value) for name, value in OF_STEP.items()), (5, "evaluation/loss", 2.25)])


def logged_to(sink):
    with RunLog(sink) as log:
        for record in RECORDS:
            log.write(record)


def test_tensorboard(monkeypatch, tmp_path):
    made, drawn = [], []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step, at: drawn.append((step, name, value)), close=lambda: made.append("closed")
    )
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder, purge_step: made.append((folder, purge_step)) or writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    logged_to(TensorBoard(tmp_path, first_step=4))
    assert made == [(str(tmp_path), 4), "closed"]
    assert sorted(drawn) == EXPECTED


def test_weights_and_biases(monkeypatch, tmp_path):
    wandb, runs = ModuleType("wandb"), []

    def init(**asked):
        run = SimpleNamespace(asked=asked, logged=[], settings={}, finished=False)
        run.config = SimpleNamespace(update=lambda options, allow_val_change: run.settings.update(options))
        run.log, run.define_metric = run.logged.append, lambda name, step_metric: None
        run.finish = lambda: setattr(run, "finished", True)
        runs.append(run)
        return run

    wandb.Error, wandb.init = RuntimeError, init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logged_to(WeightsAndBiases(tmp_path, "project"))
    run = runs[0]
    assert (run.asked["project"], run.asked["name"], run.finished) == ("project", tmp_path.name, True)
    assert run.settings == RECORDS[0].options
    logged = [(values["step"], name, value) for values in run.logged for name, value in values.items()]
    assert sorted(one for one in logged if one[1] != "step") == EXPECTED
    for resume in (True, False):
        WeightsAndBiases(tmp_path, "project", resume=resume).close()
    first, resumed, new = (run.asked["id"] for run in runs)
    assert first == resumed != new


def test_a_client_that_is_missing_is_one_sentence(monkeypatch, tmp_path):
    for name, make in (("torch.utils.tensorboard", TensorBoard), ("wandb", WeightsAndBiases)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match="uv sync --extra"):
            make(tmp_path, 0)
