"""Lifetimes, labels and categories: logs written by hand, a step watched on the CPU, and the profile on a GPU."""

import pickle

import numpy as np
import pytest
import torch

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.memory import parameter_bytes
from cs336_systems.hardware import MIB
from cs336_systems.profiling.memory import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    Label,
    labelled_gradients,
    own_place,
    profile_memory,
    state_labels,
)
from cs336_systems.training import TrainingCase, assemble
from cs336_systems.training.dry_run import dry_run
from tests.profiling.snapshots import EventLog, simulated_history

LINEAR = "/home/me/cs336_systems/model/ops.py:29 linear"
ENGINE = "/site-packages/torch/autograd/graph.py:8 engine"
CONFIG = MODEL_SIZES["tiny"]
SCALAR = 4
"""Bytes of the loss, which outlives forward."""


def step_by_hand() -> EventLog:
    """A step on one weight of 100 bytes at 1000, its moment at 2000, a workspace at 3000."""
    log = EventLog()
    log.exists(1000, 100)
    log.exists(2000, 200)
    log.exists(3000, 3)
    log.exists(3500, 4)  # the loss of the last step
    log.phase("forward")
    log.alloc(4000, 40, (ENGINE, LINEAR))  # kept for backward
    log.alloc(5000, 50)  # gone before forward ends
    log.free(5000)
    log.free(3500)
    log.phase("backward")
    log.alloc(5000, 51)  # a temporary where the gradient will be
    log.free(5000)
    log.alloc(5000, 100)  # the gradient
    log.free(4000)
    log.phase("optimizer")
    log.free(5000)
    log.alloc(5000, 70)  # the optimizer's own, at the gradient's address
    log.free(5000)
    return log


LABELS = [
    Label(1000, PARAMETERS, "w"),
    Label(2000, OPTIMIZER_STATE, "exp_avg of w"),
    Label(5000, GRADIENTS, "gradient of w"),
]


def test_every_rule_of_the_categories():
    history = step_by_hand().history(LABELS)
    found = sorted((a.n_bytes, a.category, a.name) for a in history.allocations if a.n_bytes > 1)
    assert found == [
        (3, OTHER, "existed before"),
        (4, OTHER, "existed before"),
        (40, ACTIVATIONS, ""),
        (50, TEMPORARIES, ""),
        (51, TEMPORARIES, ""),
        (70, TEMPORARIES, ""),
        (100, GRADIENTS, "gradient of w"),
        (100, PARAMETERS, "w"),
        (200, OPTIMIZER_STATE, "exp_avg of w"),
    ]


def test_the_peak_is_named_by_phase_and_category():
    history = step_by_hand().history(LABELS)
    peak = history.peak()
    assert peak.n_bytes == 443
    assert peak.by_category == dict(zip(CATEGORIES, (100, 200, 100, 40, 0, 3), strict=True))
    (kept,) = (a for a in history.allocations if a.category == ACTIVATIONS)
    assert kept.source == "model/ops.py:29 linear"
    assert [(phase.name, phase.start, phase.end) for phase in history.phases] == [
        ("forward", 1, 7),
        ("backward", 7, 13),
        ("optimizer", 13, history.n_events + 1),
    ]


def test_a_block_that_waits_for_the_device_is_freed_once():
    """``record_stream`` keeps a block back: its owner's free counts, as in ``max_memory_allocated``."""
    log = EventLog()
    log.alloc(1, 10)
    log.alloc(2, 20)
    size = log.living.pop(1)
    log.event("free_requested", 1, size)
    log.alloc(3, 30)
    log.event("free_completed", 1, size)
    log.alloc(1, 11)
    log.free(1)
    total = np.sum(list(log.history().live_bytes().values()), axis=0)
    assert total.tolist() == [0, 10, 30, 20, 50, 61, 50]


def test_what_is_alive_when_memory_runs_out_in_forward_is_an_activation():
    log = EventLog()
    log.phase("forward")
    log.alloc(1, 10)
    log.alloc(2, 20)
    log.free(2)
    log.events.append({"action": "oom", "device_free": 5, "size": 10**9})
    log.free(1)
    history = log.history()
    by_size = {a.n_bytes: a.category for a in history.allocations}
    assert (by_size[10], by_size[20]) == (ACTIVATIONS, TEMPORARIES)


# ---- steps that really run, with their storages watched


def test_a_step_on_the_cpu_has_the_predicted_categories():
    case, mode = TrainingCase.of(MODEL_SIZES["tiny"], batch_size=2), "step"
    config, precision = case.config, case.precision
    history = simulated_history(case, mode)
    live = history.live_bytes()
    assert (live[PARAMETERS] == parameter_bytes(config, precision)).all()
    assert (live[OPTIMIZER_STATE] == 2 * parameter_bytes(config, precision)).all()
    assert live[GRADIENTS].max() == parameter_bytes(config, precision)
    assert live[GRADIENTS][0] == live[GRADIENTS][-1] == 0
    backward = history.phases[1]
    assert live[ACTIVATIONS][backward.end - 1] == SCALAR
    assert live[TEMPORARIES][backward.start - 1] == live[TEMPORARIES][-1] == 0

    peak = history.peak()
    assert peak.n_bytes == pytest.approx(dry_run(case, mode).n_bytes, rel=0.02)
    in_forward = [a for a in history.allocations if a.phase == "forward" and a.n_bytes > 1]
    assert all(a.source.startswith(("model/", "training/step.py")) for a in in_forward)


def test_a_place_is_ours_whatever_the_clone_is_called():
    ours, theirs = "model/ops.py:29 linear", "site-packages/torch/nn/functional.py:8 linear"
    for clone in ("/home/me/a clone", "/x/cs336_systems", "/site-packages", "."):
        assert own_place(f"{clone}/cs336_systems/{ours}") == ours
        assert own_place(f"{clone}/.venv/lib/{theirs}") == own_place("/a b/run.py:1 main") == ""


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
    with labelled_gradients(step, labels):
        phases["forward"]()
        phases["backward"]()
        expected = {f"gradient of {name}": p.grad.data_ptr() for name, p in step.model.named_parameters()}
        phases["optimizer"]()
    assert {label.name: label.address for label in labels} == expected
    assert {label.category for label in labels} == {GRADIENTS}
    step(ids(), ids())
    assert len(labels) == len(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "backward", "step"])
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_the_categories_of_a_step_on_a_gpu(tmp_path, precision, mode):
    case = TrainingCase.of(MODEL_SIZES["small"].at_context(128), dtype=precision, device="cuda", batch_size=2)
    profile = profile_memory(case, mode, tmp_path / "snapshot.pickle")
    history, peak = profile.history, profile.history.peak()
    alive = [each for each in history.allocations if each.start <= peak.event < each.end]
    assert 0 <= profile.rounding_bytes <= 512 * len(alive) + MIB * sum(each.n_bytes > MIB for each in alive)
    assert peak.by_category[PARAMETERS] == parameter_bytes(case.config, case.precision)
    if mode == "step":
        assert peak.by_category[OPTIMIZER_STATE] == 2 * parameter_bytes(case.config, case.precision)
    if mode != "forward":
        live = history.live_bytes()
        assert live[ACTIVATIONS][history.phases[1].start - 1] >= 0.999 * live[ACTIVATIONS].max()
        assert live[GRADIENTS].max() == parameter_bytes(case.config, case.precision)
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["device_traces"]
