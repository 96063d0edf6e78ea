"""What is attached to a step while it is watched, and that it is taken off again; the whole profile on a GPU."""

import pickle

import pytest
import torch

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.memory import parameter_bytes
from cs336_systems.profiling import memory_profile
from cs336_systems.profiling.memory_history import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    reconstruct,
)
from cs336_systems.profiling.memory_profile import profile_memory, state_labels
from cs336_systems.training import TrainingCase, assemble

CONFIG = MODEL_SIZES["tiny"]
MIB = 1024**2


def ids():
    return torch.zeros(1, 8, dtype=torch.int64)


def test_labels_name_everything_that_outlives_a_step():
    step = assemble(TrainingCase.of(CONFIG))
    step(ids(), ids())
    labels = state_labels(step, ids=(token_ids := ids()))
    named = {(label.category, label.name): label.address for label in labels}
    assert len(named) == len(labels) == 3 * len(list(step.model.parameters())) + 2 + 1
    weight = step.model.layers[0].ffn.w1.weight
    assert named[PARAMETERS, "layers.0.ffn.w1.weight"] == weight.data_ptr()
    moment = step.optimizer.state[weight]["exp_avg"].data_ptr()
    assert named[OPTIMIZER_STATE, "exp_avg of layers.0.ffn.w1.weight"] == moment
    assert named["other", "ids"] == token_ids.data_ptr()


def test_gradients_are_labelled_where_they_are_accumulated_and_only_inside():
    step = assemble(TrainingCase.of(CONFIG))
    labels: list = []
    phases = step.phases("step", ids(), ids())
    with memory_profile.labelled_gradients(step, labels):
        phases["forward"]()
        phases["backward"]()
        expected = {f"gradient of {name}": p.grad.data_ptr() for name, p in step.model.named_parameters()}
        phases["optimizer"]()
    assert {label.name: label.address for label in labels} == expected
    assert {label.category for label in labels} == {GRADIENTS}
    step(ids(), ids())
    assert len(labels) == len(expected)


def test_nodes_announce_themselves_in_order_and_the_loss_function_returns(monkeypatch):
    announced: list[str] = []
    monkeypatch.setattr(memory_profile, "annotate", announced.append)
    step = assemble(TrainingCase.of(CONFIG))
    plain = assemble(TrainingCase.of(CONFIG))
    loss_function, loss_of = step.loss_function, step.loss_of
    phases = step.phases("step", ids(), ids())
    with memory_profile.named_nodes(step) as name_nodes:
        phases["forward"]()
        name_nodes()
        phases["backward"]()
        phases["optimizer"]()
    assert step.loss_function is loss_function and step.loss_of == loss_of
    assert announced[0] == "MeanBackward0" and announced[-1] == "EmbeddingBackward0"
    assert announced.count("SoftmaxBackward0") == CONFIG.n_layers
    assert "loss_of" not in vars(step)
    plain(ids(), ids())
    pairs = zip(step.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(watched, unwatched) for watched, unwatched in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["forward", "backward", "step"])
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_the_categories_of_a_step_on_a_gpu(tmp_path, precision, mode):
    case = TrainingCase.of(MODEL_SIZES["small"].at_context(128), dtype=precision, device="cuda", batch_size=2)
    profile = profile_memory(case, mode, tmp_path / "snapshot.pickle")
    history, peak = profile.history, profile.history.peak()
    large = sum(allocation.n_bytes > MIB for allocation in history.alive_at(peak.event))
    assert 0 <= profile.rounding_bytes <= 512 * len(history.alive_at(peak.event)) + MIB * large
    assert peak.n_bytes == pytest.approx(profile.unwatched_requested_bytes, rel=5e-3)
    assert peak.by_category[PARAMETERS] == parameter_bytes(case.config, case.precision)
    if mode == "step":
        assert peak.by_category[OPTIMIZER_STATE] == 2 * parameter_bytes(case.config, case.precision)
    if mode != "forward":
        live = history.live_bytes()
        assert live[ACTIVATIONS][history.phases[1].start - 1] >= 0.999 * live[ACTIVATIONS].max()
        assert live[GRADIENTS].max() == parameter_bytes(case.config, case.precision)
        in_backward = [a for a in history.allocations if a.phase == "backward" and a.category == TEMPORARIES]
        assert sum("Backward" in a.operation for a in in_backward) > 0.9 * len(in_backward)
    assert reconstruct(pickle.loads(profile.path.read_bytes())).peak() == peak
