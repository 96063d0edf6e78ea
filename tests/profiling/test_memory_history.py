"""Lifetimes and categories, from logs written by hand and taken from a step that runs on the CPU."""

import numpy as np
import pytest

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.memory import parameter_bytes
from cs336_systems.profiling.memory_history import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    own_place,
    reconstruct,
)
from cs336_systems.training import TrainingCase
from cs336_systems.training.dry_run import dry_run
from tests.profiling.snapshots import EventLog, simulated_snapshot

LINEAR = "/home/me/cs336_systems/model/ops.py:29 linear"
ENGINE = "/site-packages/torch/autograd/graph.py:8 engine"
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
    log.metadata = "MmBackward0"
    log.alloc(5000, 51)  # a temporary where the gradient will be
    log.free(5000)
    log.alloc(5000, 100)  # the gradient
    log.free(4000)
    log.metadata = ""
    log.phase("optimizer")
    log.free(5000)
    log.alloc(5000, 70)  # the optimizer's own, at the gradient's address
    log.free(5000)
    return log


LABELS = [[1000, PARAMETERS, "w"], [2000, OPTIMIZER_STATE, "exp_avg of w"], [5000, GRADIENTS, "gradient of w"]]


def test_every_rule_of_the_categories():
    history = reconstruct(step_by_hand().snapshot(LABELS))
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
    history = reconstruct(step_by_hand().snapshot(LABELS))
    peak = history.peak()
    assert peak.n_bytes == 443
    assert peak.by_category == dict(zip(CATEGORIES, (100, 200, 100, 40, 0, 3), strict=True))
    assert [a.n_bytes for a in history.alive_at(peak.event)] == [200, 100, 100, 40, 3]
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
    log._event("free_requested", 1, size)
    log.alloc(3, 30)
    log._event("free_completed", 1, size)
    log.alloc(1, 11)
    log.free(1)
    total = np.sum(list(reconstruct(log.snapshot()).live_bytes().values()), axis=0)
    assert total.tolist() == [0, 10, 30, 20, 50, 61, 50]


def test_what_is_alive_when_memory_runs_out_in_forward_is_an_activation():
    log = EventLog()
    log.phase("forward")
    log.alloc(1, 10)
    log.alloc(2, 20)
    log.free(2)
    log.events.append({"action": "oom", "device_free": 5, "size": 10**9})
    log.free(1)
    history = reconstruct(log.snapshot())
    assert history.out_of_memory == 5
    by_size = {a.n_bytes: a.category for a in history.allocations}
    assert (by_size[10], by_size[20]) == (ACTIVATIONS, TEMPORARIES)


# ---- steps that really run, with their storages watched


def test_a_step_on_the_cpu_has_the_predicted_categories():
    case, mode = TrainingCase.of(MODEL_SIZES["tiny"], batch_size=2), "step"
    config, precision = case.config, case.precision
    history = reconstruct(simulated_snapshot(case, mode))
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
    in_backward = [a for a in history.allocations if a.phase == "backward" and a.n_bytes > SCALAR]
    assert all("Backward" in a.operation for a in in_backward)
    in_forward = [a for a in history.allocations if a.phase == "forward" and a.n_bytes > 1]
    assert all(a.source.startswith(("model/", "training/step.py")) for a in in_forward)


@pytest.mark.parametrize("clone", ["/home/me/a clone", "/x/cs336_systems", "/site-packages", "."])
def test_a_place_is_ours_whatever_the_clone_is_called(clone):
    ours, theirs = "model/ops.py:29 linear", "site-packages/torch/nn/functional.py:8 linear"
    assert own_place(f"{clone}/cs336_systems/{ours}") == ours
    assert own_place(f"{clone}/.venv/lib/{theirs}") == own_place("/a b/run.py:1 main") == ""
