"""The memory of a device by segment, predicted and measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.config import resolve_size
from cs336_systems.costs.memory import parameter_bytes
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import predicted_segments
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Memory
from tests.distributed.checks import spawn
from tests.pretraining.trained import options, train_each, write_dataset

H200 = 141 * 2**30
QWEN = replace(resolve_size("qwen2.5-0.5b"), n_layers=2)


@pytest.fixture(autouse=True)
def workspace(monkeypatch):
    monkeypatch.setattr("cs336_systems.harness.memory.cublas_workspace_bytes", lambda device: 2**25)


def case_of(world_size: int = 1, **changes):
    return replace(TrainOptions.default("cuda"), **changes).training_case(QWEN, world_size)


def test_segments_add_up_to_the_device():
    plain = predicted_segments(case_of(), H200)
    for changes, more in (
        ({}, 1),
        ({"master_weights": "fp32"}, 1),
        ({"accumulate": 4}, 1),
        ({"moments": "fp32"}, 2),
    ):
        segments = predicted_segments(case_of(**changes), H200)
        *parts, whole, free = segments.values()
        assert sum(parts) == whole == H200 - free
        assert min(parts) >= 0
        assert segments["m"] == segments["v"] == pytest.approx(segments["weights"] * more, rel=0.01)
        if "accumulate" in changes:  # gradients of earlier micro-batches are there at the peak
            assert segments["gradients"] >= parameter_bytes(QWEN, case_of().precision)
        if "master_weights" in changes:
            assert segments["master"] == pytest.approx(2 * plain["weights"], rel=2e-3)


def test_states_alone_where_the_peak_is_not_predicted():
    for changes, moments, parts in (
        ({"kernels": "reference"}, 1, 1),
        ({"zero": 1}, 2, 2),
        ({"zero": 1, "accumulate": 2}, 2, 1),
        ({"zero": 2, "accumulate": 2}, 2, 2),
        ({"zero": 3, "accumulate": 2}, 1, 1),
    ):
        segments = predicted_segments(case_of(2, **changes), H200)
        assert list(segments) == ["weights", "gradients", "m", "v"]
        assert segments["gradients"] == segments["weights"] // parts
        assert segments["weights"] == pytest.approx(moments * segments["m"], rel=0.01)
    away = predicted_segments(case_of(master_weights="fp32", offload=("m", "v", "gradients")), H200)
    on_host = {name for name in away if name.endswith("on the host")}
    assert on_host == {"gradients on the host", "m on the host", "v on the host"}
    assert away["gradients"] == 0 and not away.keys() & {"m", "v"}
    assert away["master"] == pytest.approx(2 * away["weights"], rel=2e-3)


def test_adapters_alone_have_gradients_and_states():
    lora = {"lora_rank": 16, "init": Path("base")}
    n_adapters = 2 * 16 * 2 * (3 * 896 + 896 + 2 * 128 + 2 * 896 + 2 * (896 + 4864) + 4864 + 896)  # bf16
    weights = parameter_bytes(QWEN, case_of().precision) + n_adapters
    plain = predicted_segments(case_of(), H200)
    for changes in ({}, {"accumulate": 4}, {"kernels": "reference"}):
        segments = predicted_segments(case_of(**lora, **changes), H200)
        assert segments["m"] == segments["v"] == pytest.approx(n_adapters, rel=0.02)
        assert segments["weights"] == pytest.approx(weights, rel=0.01)
        if changes:
            assert segments["gradients"] == pytest.approx(n_adapters, rel=0.02)
        if "kernels" not in changes:  # no states and, in the loss, no gradient of the head
            assert segments["in all"] < plain["in all"] - 2.5 * parameter_bytes(QWEN, case_of().precision)
    away = predicted_segments(case_of(**lora, offload=("m", "v")), H200)
    assert away["m on the host"] == n_adapters


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", ["off", "on"])
def test_memory_is_as_predicted_and_logged(tmp_path, cuda_graph):
    """Of a process of its own: other tests leave two of cuBLAS's workspaces for each stream that they multiplied on."""
    write_dataset(tmp_path / "data", n_train=200_000)
    like = {
        name: getattr(TrainOptions.default("cuda"), name) for name in ("dtype", "optimizer", "kernels", "attention")
    }
    shape = {"size": "qwen2.5-0.5b", "device": "cuda", "context_length": 1024, "accumulate": 3, "steps": 5}
    asked = options(tmp_path, **like, **shape, keep="products", cuda_graph=cuda_graph, evaluate_every=None)
    spawn(train_each, 1, [replace(asked, export=False, save_every=None)], device="cuda")
    predicted, measured = read_run(tmp_path / "run" / LOG).all(Memory)
    assert predicted.predicted_bytes == measured.predicted_bytes and not predicted.actual_bytes
    assert measured.actual_bytes["in all"] == pytest.approx(measured.predicted_bytes["in all"], rel=0.03)
