"""AdamW against the paper's formula by hand, against torch's own, and as an optimizer that can be saved and resumed."""

from functools import partial

import pytest
import torch
from torch import nn

from cs336_systems.training import AdamW
from tests.training import shared
from tests.training.shared import flat, run, set_gradients

parameters = partial(shared.parameters, [(7, 5), (3,), (), (2, 3, 4)], torch.float64)

HYPERPARAMETERS = [
    pytest.param({"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}, id="strong-decay"),
    pytest.param({"lr": 0.1, "betas": (0.0, 0.0), "weight_decay": 0.0}, id="no-memory"),
]


@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS)
def test_many_steps_are_torchs_in_fp64(hyperparameters):
    """30 steps of a dozen roundings of 1.1e-16 each: 1e-12 leaves no room for another formula."""
    ours, theirs = parameters(), parameters()
    run(AdamW(ours, **hyperparameters), ours, range(30))
    run(torch.optim.AdamW(theirs, foreach=False, fused=False, **hyperparameters), theirs, range(30))
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS[:1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_in_narrow_dtypes_stays_within_torchs_own(dtype, hyperparameters):
    start = [parameter.detach().to(dtype) for parameter in parameters()]
    oracle = [nn.Parameter(tensor.double()) for tensor in start]
    optimizer = torch.optim.AdamW(oracle, foreach=False, fused=False, **hyperparameters)
    for step in range(30):
        set_gradients(oracle, step)
        for parameter in oracle:
            parameter.grad = parameter.grad.to(dtype).double()
        optimizer.step()
    errors = []
    for make in (AdamW, lambda params, **kwargs: torch.optim.AdamW(params, foreach=False, fused=False, **kwargs)):
        params = [nn.Parameter(tensor.clone()) for tensor in start]
        run(make(params, **hyperparameters), params, range(30))
        errors.append(torch.linalg.vector_norm(flat(params) - flat(oracle)).item())
    print(f"{dtype}: ours {errors[0]:.3e}, torch.optim.AdamW {errors[1]:.3e}")
    assert 0 < errors[0] <= 1.5 * errors[1]


def test_each_group_has_its_own_hyperparameters_also_when_added_late():
    def groups(params: list[nn.Parameter]) -> list[dict]:
        return [{"params": params[:1], "lr": 0.1}, {"params": params[1:3], "weight_decay": 0.4, "betas": (0.5, 0.6)}]

    ours, theirs = parameters(), parameters()
    optimizers = AdamW(groups(ours), lr=0.01), torch.optim.AdamW(groups(theirs), lr=0.01, foreach=False, fused=False)
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        set_gradients(params, 0)
        params[1].grad = None  # it is left alone
        optimizer.step()
        assert params[1] not in optimizer.state
        optimizer.param_groups[0]["lr"] = 0.05  # as a schedule changes it
        run(optimizer, params, range(1, 5))
        torch.testing.assert_close(params[3], parameters()[3], rtol=0, atol=0)
        optimizer.add_param_group({"params": params[3:], "lr": 0.3})
        run(optimizer, params, range(5, 12))
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("hyperparameters", "value"),
    [
        ({"lr": -1e-3}, "-0.001"),
        ({"betas": (1.0, 0.9)}, r"\(1\.0, 0\.9\)"),
        ({"eps": -1e-8}, "-1e-08"),
        ({"weight_decay": -0.5}, "-0.5"),
    ],
)
def test_a_hyperparameter_out_of_range_is_named_with_its_value(hyperparameters, value):
    with pytest.raises(ValueError, match=f"{next(iter(hyperparameters))} must .*, got {value}$"):
        AdamW(parameters(), **hyperparameters)
