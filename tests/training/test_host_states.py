"""States in host memory change where they lie and nothing else, however tensors are cut on the way."""

import copy

import pytest
import torch

from cs336_systems.kernels.host_memory import HostLink
from cs336_systems.training import host_states
from cs336_systems.training.fused_adamw import FusedAdamW

from .shared import same_bits
from .test_fused_adamw import BF16, DEVICE, FP32, groups, parameters, run, set_gradients

STATES = ("exp_avg", "exp_avg_sq", "master")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that tensors are cut, and batches hold several."""
    monkeypatch.setattr(host_states, "BATCH_ELEMENTS", 256)


def states_of(optimizer, params):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return [tensor.cpu() for parameter in params for tensor in optimizer.state[parameter].values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, {"offload": STATES, "master": True, "state_dtype": FP32}),
        (FP32, {"offload": STATES, "master": True, "state_dtype": BF16}),
    ],
)
def test_steps_are_the_same_bits(dtype, options):
    plain, away = parameters(dtype), parameters(dtype)
    without = FusedAdamW(groups(plain), seed=3, **options | {"offload": ()})
    offloaded = FusedAdamW(groups(away), seed=3, **options)
    for step in range(7):
        for optimizer, params in ((without, plain), (offloaded, away)):
            set_gradients(params, step)
            if step == 4:
                params[1].grad = None  # it counts its own steps
            scale = torch.tensor(float("nan") if step == 5 else 0.5, device=DEVICE)
            optimizer.step(grad_scale=scale)
    assert same_bits(plain, away)
    assert all(map(torch.equal, states_of(without, plain), states_of(offloaded, away)))
    assert offloaded.state[away[0]]["step"] == 6
    assert offloaded.state[away[1]]["step"] == 5
    for name, tensor in offloaded.state[away[-1]].items():
        assert tensor.device.type == ("cpu" if name in options["offload"] else DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "masters"), [((), True), (STATES, False)])
def test_a_state_saved_with_offload_resumes_without_and_the_other_way_round(first, masters):
    whole = parameters(BF16)
    run(FusedAdamW(groups(whole), master=masters), whole, range(5))
    params = parameters(BF16)
    optimizer = FusedAdamW(groups(params), master=masters, offload=first)
    run(optimizer, params, range(3))
    second = STATES if not first else ()
    resumed = copy.deepcopy(params)
    other = FusedAdamW(groups(resumed), master=masters, offload=second)
    other.load_state_dict(optimizer.state_dict())
    run(other, resumed, range(3, 5))
    assert same_bits(resumed, whole)


def test_masters_begin_at_the_parameters_where_a_state_has_none_and_may_be_left_behind():
    params = parameters(BF16)
    optimizer = FusedAdamW(params)
    run(optimizer, params, range(2))
    with_masters = FusedAdamW(params, master=True)
    with_masters.load_state_dict(optimizer.state_dict())
    for parameter in params:
        assert torch.equal(with_masters.state[parameter]["master"], parameter.float())
    run(with_masters, params, range(2, 3))
    optimizer.load_state_dict(with_masters.state_dict())
    assert "master" not in optimizer.state[params[0]]
    assert optimizer.state[params[0]]["step"] == 3


def test_what_is_on_its_way_out_is_what_comes_back():
    link = HostLink(torch.device(DEVICE))
    hosts = [torch.empty(1000) for _ in range(6)]
    for i, host in enumerate(hosts):
        link.send([torch.full((1000,), float(i), device=DEVICE)], [host])
    found = [link.fetch([host]).wait()[0].mean().item() for host in reversed(hosts)]
    assert found == [5, 4, 3, 2, 1, 0]
    patient = HostLink(torch.device(DEVICE), in_flight_bytes=2**20)
    for value in (1.0, 2.0):
        patient.send([torch.full((1000,), value, device=DEVICE)], hosts[:1])
    assert patient.fetch(hosts[:1]).wait()[0].mean().item() == 2
