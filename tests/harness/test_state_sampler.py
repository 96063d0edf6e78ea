"""Readings of a device beside a run."""

import time

import pytest
import torch

from cs336_systems.harness import state_sampler
from cs336_systems.harness.state_sampler import sampled_state

CPU = torch.device("cpu")


def test_readings_are_taken_while_the_body_runs_and_stop_with_it(monkeypatch):
    monkeypatch.setattr(state_sampler, "device_state", lambda device: {"power_w": 100, "throttle": [], "none": None})
    with sampled_state(CPU, interval_s=0.01) as states:
        time.sleep(0.3)
    taken = len(states)
    time.sleep(0.05)
    assert len(states) == taken > 3
    assert states.values("power_w") == [100.0] * taken
    assert states.values("none") == states.values("unknown") == []


def test_a_body_shorter_than_the_interval_has_one_reading():
    with sampled_state(CPU, interval_s=60) as states:
        pass
    assert len(states.values("load_1min")) == 1


def test_an_error_of_the_thread_is_raised_on_leaving_but_hides_none(monkeypatch):
    calls = []

    def read(device):
        calls.append(device)
        if len(calls) > 1:
            raise OSError("device lost")
        return {}

    monkeypatch.setattr(state_sampler, "device_state", read)
    with pytest.raises(OSError, match="device lost"), sampled_state(CPU, interval_s=0.001):
        time.sleep(0.1)
    calls.clear()
    with pytest.raises(KeyError), sampled_state(CPU, interval_s=0.001):
        time.sleep(0.1)
        raise KeyError


def test_an_interval_must_be_positive():
    with pytest.raises(ValueError, match="interval_s must be positive, got 0"):
        sampled_state(CPU, 0).__enter__()
