"""What the picture of runs holds, and what it says where there is nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.hardware import find_hardware
from cs336_systems.pretraining.run_log import read_run
from cs336_systems.pretraining.run_records import Device, LoggedStep
from cs336_systems.report.run_figure import run_figure
from tests.pretraining.runs import opening, training, write

LIGHT = speed_of_light(MODEL_SIZES["qwen2.5-0.5b"], 1024, find_hardware("NVIDIA H200"))
LABELS = {
    "loss": "loss, nats per token",
    "norm": "gradient norm",
    "rate": "learning rate, 10⁻³",
    "tokens/s": "tokens/s",
    "light": "% of the speed of light",
    "memory": "GPU memory in use, GiB",
    "clock": "GPU clock, MHz",
    "power": "GPU power, W",
    "temperature": "GPU temperature, °C",
}


@pytest.fixture
def run(tmp_path):
    """Reads a log of these records."""

    def run(*records, name="log"):
        write(tmp_path / f"{name}.jsonl", *records)
        return read_run(tmp_path / f"{name}.jsonl")

    return run


def panels(figure):
    found = {axes.get_ylabel(): axes for axes in figure.axes}
    assert sorted(found) == sorted(LABELS.values())
    return {name: found[label] for name, label in LABELS.items()}


def said(axes):
    return [text.get_text() for text in axes.texts]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_every_quantity_of_a_run_is_drawn(run):
    one = run(*opening(200, light=LIGHT), *training(200))
    axes = panels(run_figure({"one": one}))
    assert [said(panel) for panel in axes.values()] == [[]] * 9
    pale, smooth, evaluations, *_ = axes["loss"].lines
    assert pale.get_xydata().tolist() == one.steps[["step", "loss"]].to_numpy().tolist()
    window = one.steps["loss"].iloc[98:102]  # 4 of 200 steps, around step 100
    assert smooth.get_ydata()[100] == pytest.approx(window.median())
    assert evaluations.get_xydata().tolist() == one.evaluations[["step", "loss"]].to_numpy().tolist()
    assert axes["rate"].lines[0].get_ydata().max() == pytest.approx(0.3)
    share = one.steps["tokens_per_s"] / 1e6 * LIGHT.seconds_per_token * 1e8
    assert axes["light"].lines[0].get_ydata() == pytest.approx(share)
    assert axes["power"].lines[0].get_xydata().tolist() == one.gpu[["step", "power_w"]].to_numpy().tolist()
    assert axes["memory"].lines[0].get_ydata() == pytest.approx([37.2] * 20)
    assert legend(axes["loss"]) == ["each step", "running median", "evaluation"]


def test_runs_without_a_gpu_have_no_panels_of_one(run):
    records = [Device("AMD EPYC", 1, None, {}) if isinstance(one, Device) else one for one in opening(60)]
    on_cpu = run(*records, *training(60, gpu_every=None), name="cpu")
    labels = sorted(axes.get_ylabel() for axes in run_figure({"a": on_cpu, "b": on_cpu}).axes)
    assert labels == sorted(LABELS[name] for name in ("loss", "norm", "rate", "tokens/s"))


@pytest.mark.slow
def test_a_run_that_has_not_begun_says_what_is_missing(run, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for one in (run(*opening(10)), read_run(tmp_path / "empty.jsonl")):
        assert [said(panel) for panel in panels(run_figure({"one": one})).values()] == [["not in the log"]] * 9


def test_what_is_not_finite_is_marked_and_bends_no_line(run):
    steps = [LoggedStep(i, 0.1, 10, [2.0, math.nan, math.inf, 2.0][i % 4], 1.0, 1e-3) for i in range(200)]
    axes = panels(run_figure({"one": run(*opening(200), *steps)}))
    smooth, marks = axes["loss"].lines[1], axes["loss"].lines[-1]
    assert set(smooth.get_ydata()) == {2.0}
    assert marks.get_marker() == "x"
    assert marks.get_xdata().tolist() == [i for i in range(200) if i % 4 in (1, 2)]
    assert "not finite" in legend(axes["loss"])


def test_runs_stand_over_what_they_have_spent(run):
    records = [
        replace(one, seconds=3600.0) if isinstance(one, LoggedStep) else one for one in training(100, gpu_every=25)
    ]
    one = run(*opening(100), *records)
    for x, scale in {"tokens": 0.524288, "hours": 1.0}.items():
        axes = panels(run_figure({"one": one}, x=x))
        assert axes["loss"].lines[0].get_xdata() == pytest.approx(np.arange(100) * scale)
        assert axes["loss"].lines[2].get_xdata() == pytest.approx(np.array([50, 100]) * scale)
        assert axes["power"].lines[0].get_xdata() == pytest.approx(np.array([0, 25, 50, 75]) * scale)


def test_what_cannot_be_drawn_is_refused(run):
    one = run(*opening(3))
    for runs in ({str(i): one for i in range(8)}, {}):
        with pytest.raises(ValueError, match=f"got {len(runs)}"):
            run_figure(runs)
