"""AdamW against the paper's formula by hand, against torch's own, and as an optimizer that can be saved and resumed."""

import io
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.config import OPTIMIZERS
from cs336_systems.training import AdamW
from cs336_systems.training.optimizer import make_optimizer

SHAPES = [(7, 5), (3,), (), (2, 3, 4)]


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Gradients of very different sizes, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        parameter.grad = (gradient * 10.0 ** torch.randint(-3, 2, (), generator=generator)).to(parameter.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def flat(params: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in params])


def assert_same_bits(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> None:
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


HYPERPARAMETERS = [
    pytest.param({}, id="defaults"),
    pytest.param({"lr": 0.05, "weight_decay": 0.0}, id="no-decay"),
    pytest.param({"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}, id="strong-decay"),
    pytest.param({"lr": 0.1, "betas": (0.0, 0.0)}, id="no-memory"),
    pytest.param({"lr": 0.0, "weight_decay": 0.5}, id="lr-zero"),
]


@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS)
def test_many_steps_are_torchs_in_fp64(hyperparameters):
    """100 steps of a dozen roundings of 1.1e-16 each: 1e-12 leaves no room for another formula."""
    ours, theirs = parameters(), parameters()
    run(AdamW(ours, **hyperparameters), ours, range(100))
    run(torch.optim.AdamW(theirs, foreach=False, fused=False, **hyperparameters), theirs, range(100))
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_in_narrow_dtypes_stays_within_torchs_own(dtype, hyperparameters):
    start = [parameter.detach() for parameter in parameters(dtype)]
    oracle = [nn.Parameter(tensor.double()) for tensor in start]
    optimizer = torch.optim.AdamW(oracle, foreach=False, fused=False, **hyperparameters)
    for step in range(100):
        set_gradients(oracle, step)
        for parameter in oracle:
            parameter.grad = parameter.grad.to(dtype).double()
        optimizer.step()
    errors = []
    for make in (AdamW, lambda params, **kwargs: torch.optim.AdamW(params, foreach=False, fused=False, **kwargs)):
        params = [nn.Parameter(tensor.clone()) for tensor in start]
        run(make(params, **hyperparameters), params, range(100))
        errors.append(torch.linalg.vector_norm(flat(params) - flat(oracle)).item())
    print(f"{dtype}: ours {errors[0]:.3e}, torch.optim.AdamW {errors[1]:.3e}")
    assert 0 < errors[0] <= 1.5 * errors[1]


def test_first_and_second_step_by_hand():
    """theta 1, gradient 0.5 then -0.25; lr 0.1, betas 0.9 and 0.99, eps 0.01, lambda 0.1 (Loshchilov & Hutter, alg. 2).

    1. m = 0.05, v = 0.0025, corrected 0.5 and 0.25, so theta = 1 - 0.1 (0.5 / (0.5 + 0.01) + 0.1 x 1).
    2. m = 0.02, v = 0.0031, corrected 0.02 / 0.19 and 0.0031 / 0.0199.
    """
    theta = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = AdamW([theta], lr=0.1, betas=(0.9, 0.99), eps=0.01, weight_decay=0.1)
    theta.grad = torch.tensor([0.5], dtype=torch.float64)
    optimizer.step()
    first = 1 - 0.1 * (0.5 / 0.51 + 0.1)
    assert theta.item() == pytest.approx(first, rel=1e-14)
    theta.grad = torch.tensor([-0.25], dtype=torch.float64)
    optimizer.step()
    second = first - 0.1 * ((0.02 / 0.19) / (math.sqrt(0.0031 / 0.0199) + 0.01) + 0.1 * first)
    assert theta.item() == pytest.approx(second, rel=1e-14)


def test_weight_decay_is_decoupled_from_the_moments():
    """Without a gradient's signal only the decay acts, and the moments stay empty."""
    theta = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    optimizer = AdamW([theta], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        theta.grad = torch.zeros_like(theta)
        optimizer.step()
    torch.testing.assert_close(theta.detach(), torch.full_like(theta, 2 * 0.95**3), rtol=1e-14, atol=0)
    assert not optimizer.state[theta]["exp_avg"].any()
    assert not optimizer.state[theta]["exp_avg_sq"].any()


def test_each_group_has_its_own_hyperparameters_also_when_added_late():
    def groups(params: list[nn.Parameter]) -> list[dict]:
        return [{"params": params[:1], "lr": 0.1}, {"params": params[1:3], "weight_decay": 0.4, "betas": (0.5, 0.6)}]

    ours, theirs = parameters(), parameters()
    optimizers = AdamW(groups(ours), lr=0.01), torch.optim.AdamW(groups(theirs), lr=0.01, foreach=False, fused=False)
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        run(optimizer, params, range(5))
        torch.testing.assert_close(params[3], parameters()[3], rtol=0, atol=0)
        optimizer.add_param_group({"params": params[3:], "lr": 0.3})
        run(optimizer, params, range(5, 12))
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-12, atol=1e-12)


def test_a_parameter_without_a_gradient_is_left_alone():
    params = parameters()
    optimizer = AdamW(params, lr=0.1, weight_decay=0.5)
    set_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    assert torch.equal(params[1], parameters()[1])
    assert params[1] not in optimizer.state
    assert not any(torch.equal(params[i], parameters()[i]) for i in (0, 2, 3))


def test_a_closure_runs_with_gradients_and_its_loss_is_returned():
    theta, twin = (nn.Parameter(torch.tensor([3.0, -2.0])) for _ in range(2))
    optimizer, without = AdamW([theta], lr=0.1), AdamW([twin], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 13.0
    twin.grad = 2 * torch.tensor([3.0, -2.0])
    assert without.step() is None
    assert torch.equal(theta, twin)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_resumes_with_the_same_bits(name):
    hyperparameters = {"lr": 0.03, "betas": (0.7, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    whole = parameters(torch.float32)
    run(make_optimizer(name, whole, **hyperparameters), whole, range(11))

    params = parameters(torch.float32)
    optimizer = make_optimizer(name, params, **hyperparameters)
    run(optimizer, params, range(6))
    file = io.BytesIO()
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [nn.Parameter(tensor.detach().clone()) for tensor in saved["params"]]
    optimizer = make_optimizer(name, resumed)
    optimizer.load_state_dict(saved["optimizer"])
    run(optimizer, resumed, range(6, 11))
    assert_same_bits(resumed, whole)


def test_a_learning_rate_schedule_is_followed():
    ours, theirs = parameters(), parameters()
    optimizers = AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False, fused=False)
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(10):
            run(optimizer, params, range(step, step + 1))
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 11)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_state_has_the_parameters_dtype_and_shape(dtype):
    params = parameters(dtype)
    optimizer = AdamW(params)
    run(optimizer, params, range(3))
    for parameter in params:
        state = optimizer.state[parameter]
        assert state["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert (state[name].shape, state[name].dtype) == (parameter.shape, dtype)


@pytest.mark.parametrize(
    ("hyperparameters", "value"),
    [
        ({"lr": -1e-3}, "-0.001"),
        ({"betas": (1.0, 0.9)}, r"\(1\.0, 0\.9\)"),
        ({"betas": (0.9, 1.5)}, r"\(0\.9, 1\.5\)"),
        ({"betas": (-0.1, 0.9)}, r"\(-0\.1, 0\.9\)"),
        ({"eps": -1e-8}, "-1e-08"),
        ({"weight_decay": -0.5}, "-0.5"),
    ],
)
def test_a_hyperparameter_out_of_range_is_named_with_its_value(hyperparameters, value):
    with pytest.raises(ValueError, match=f"{next(iter(hyperparameters))} must .*, got {value}$"):
        AdamW(parameters(), **hyperparameters)


def test_optimizers_by_name_agree_on_their_defaults():
    reference, fused = (parameters(), parameters())
    optimizers = make_optimizer("reference", reference), make_optimizer("torch-fused", fused)
    assert type(optimizers[0]) is AdamW
    assert type(optimizers[1]) is torch.optim.AdamW
    assert optimizers[1].defaults["fused"] is True
    for name, value in optimizers[0].defaults.items():
        assert optimizers[1].defaults[name] == value, name
    run(optimizers[0], reference, range(20))
    run(optimizers[1], fused, range(20))
    torch.testing.assert_close(flat(reference), flat(fused), rtol=1e-12, atol=1e-12)


def test_an_unknown_optimizer_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown optimizer 'sgd': known are reference, torch-fused"):
        make_optimizer("sgd", parameters())


@pytest.mark.slow
def test_it_does_not_import_dynamo():
    imports = "import sys, torch; from cs336_systems.training import AdamW"
    steps = "optimizer = AdamW([torch.ones(1, requires_grad=True)]); optimizer.zero_grad(); optimizer.step()"
    code = f"{imports}; {steps}; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
