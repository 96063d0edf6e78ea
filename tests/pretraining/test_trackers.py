"""Which numbers go to TensorBoard and to Weights & Biases, by stand-ins for both."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import Evaluation, GpuState, LoggedStep
from cs336_systems.pretraining.trackers import TensorBoard, WeightsAndBiases
from tests.pretraining.runs import opening

RECORDS = [
    *opening(9, first_step=4),
    LoggedStep(4, 0.5, 1000, 2.5, 1.5, 3e-4),
    Evaluation(5, 2.25, 100, 0.1),
    GpuState(4, 1980.0, None, None, 50.0, "", None),
]
DRAWN = [
    (4, {"train/loss": 2.5, "train/norm": 1.5, "train/learning_rate": 3e-4, "train/seconds": 0.5}),
    (4, {"train/tokens_per_s": 2000.0}),
    (5, {"evaluation/loss": 2.25}),
    (4, {"gpu/sm_mhz": 1980.0, "gpu/temperature_c": 50.0}),
]
EXPECTED = sorted((step, name, value) for step, values in DRAWN for name, value in values.items())


def test_tensorboard(monkeypatch, tmp_path):
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step, at):
            calls.append((step, name, value))

        def close(self):
            calls.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with RunLog(TensorBoard(tmp_path, first_step=4)) as log:
        for record in RECORDS:
            log.write(record)
    assert calls[0] == (str(tmp_path), 4)
    assert sorted(calls[1:-1]) == EXPECTED
    assert calls[-1] == "closed"


class Wandb(ModuleType):
    """The part of the client that is used; what is logged goes to ``runs``."""

    Error = RuntimeError

    def __init__(self):
        super().__init__("wandb")
        self.runs = []

    def init(self, **asked):
        run = SimpleNamespace(asked=asked, logged=[], settings={}, finished=False)
        run.config = SimpleNamespace(update=lambda options, allow_val_change: run.settings.update(options))
        run.log, run.define_metric = run.logged.append, lambda name, step_metric: None
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


def test_weights_and_biases(monkeypatch, tmp_path):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with RunLog(WeightsAndBiases(tmp_path, "project")) as log:
        for record in RECORDS:
            log.write(record)
    run = wandb.runs[0]
    assert (run.asked["project"], run.asked["name"], run.finished) == ("project", tmp_path.name, True)
    assert run.settings == RECORDS[0].options
    logged = [(values["step"], name, value) for values in run.logged for name, value in values.items()]
    assert sorted(one for one in logged if one[1] != "step") == EXPECTED
    for resume in (True, False):
        WeightsAndBiases(tmp_path, "project", resume=resume).close()
    first, resumed, new = (run.asked["id"] for run in wandb.runs)
    assert first == resumed != new


def test_a_client_that_is_missing_or_refuses_is_one_sentence(monkeypatch, tmp_path):
    wandb = Wandb()
    wandb.init = lambda **asked: (_ for _ in ()).throw(RuntimeError("api_key not configured"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ValueError, match="api_key not configured"):
        WeightsAndBiases(tmp_path, "project")
    assert list(tmp_path.iterdir()) == []
    for name, make in (("torch.utils.tensorboard", TensorBoard), ("wandb", WeightsAndBiases)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match="uv sync --extra"):
            make(tmp_path, 0)
