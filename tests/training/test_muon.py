"""Muon against its formula in fp64, the band of its singular values, and bits that skip, resume and round."""

import math

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.config import MODEL_SIZES
from cs336_systems.model import TransformerLM
from cs336_systems.training.muon import MUON, TorchMuon, muon_groups, orthogonalised
from cs336_systems.training.optimizer import AdamW
from tests.kernels.interpreter import interpret_without_gpu
from tests.training.shared import same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(48, 32), (16, 40), (24, 24), (30, 8), (20,)]
"""Three matrices for Muon, one for AdamW, and a vector."""


def scalar_map(s: Tensor) -> Tensor:
    """What five steps of the iteration make of singular values."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def eager(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The iteration as it is published, one operation after the other."""
    x = matrix.to(dtype)
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter((0.1 * torch.randn(shape, generator=generator, device="cpu")).to(DEVICE, dtype))
        for shape in SHAPES
    ]


def groups(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:3], MUON: True}, {"params": params[3:4]}, {"params": params[4:], "weight_decay": 0.0}]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator, device="cpu").to(DEVICE) for shape in SHAPES]


def run(optimizer, params: list[nn.Parameter], steps: range, **kwargs) -> None:
    for step in steps:
        for parameter, gradient in zip(params, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step(**kwargs)


HYPERPARAMETERS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.3}


def class_of(kind: str):
    """A class and its arguments; the fused one in Triton's interpreter, where there is no GPU."""
    if kind == "torch":
        return TorchMuon, {"fused": True}
    interpret_without_gpu()
    from cs336_systems.training.fused_muon import FusedMuon

    return FusedMuon, {}


def make(kind: str, params: list[nn.Parameter]):
    cls, options = class_of(kind)
    return cls(groups(params), **HYPERPARAMETERS, **options)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40)])
def test_singular_values_go_through_the_polynomial_and_end_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    exact = u @ torch.diag(scalar_map(s / s.norm())) @ vh
    # Each of 15 products rounds by 1e-16 times its length, and steps grow an error by at most 3.4445 each.
    assert (orthogonalised(matrix, torch.float64) - exact).abs().max() < 15 * max(shape) * 1.1e-16 * 3.4445**5
    found = torch.linalg.svdvals(orthogonalised(matrix).double())
    # A singular value is off by at most the norm of the error, whose budget is that of the published iteration in bf16.
    budget = 1.5 * torch.linalg.matrix_norm(eager(matrix, torch.bfloat16).double() - exact, 2)
    inside = scalar_map(torch.linspace(s.min() / s.norm(), 1, 100_000, dtype=torch.float64))
    assert found.min() > inside.min() - budget and found.max() < inside.max() + budget
    assert inside.min() > 0.6 and inside.max() < 1.21 and budget < 0.1, (inside.min(), inside.max(), budget)


def test_ten_steps_are_the_papers_formula_in_fp64():
    """The budget is the error of the formula with the published iteration in bf16; AdamW has its own tests."""

    def formula(dtype: torch.dtype) -> list[Tensor]:
        weights = [parameter.detach().double() for parameter in parameters(torch.float32)[:3]]
        moments = [torch.zeros_like(weight) for weight in weights]
        for step in range(10):
            for weight, moment, gradient in zip(weights, moments, gradients(step)[:3], strict=True):
                moment.mul_(0.95).add_(gradient)
                update = eager(gradient.double() + 0.95 * moment, dtype).double()
                weight.mul_(1 - 0.01 * 0.3).sub_(0.01 * 0.2 * max(weight.shape) ** 0.5 * update)
        return weights

    ours, rest = parameters(torch.float32), parameters(torch.float64)[3:]
    run(make("torch", ours), ours, range(10))
    exact, budget = formula(torch.float64), formula(torch.bfloat16)
    for found, oracle, narrow in zip(ours, exact, budget, strict=False):
        errors = [torch.linalg.matrix_norm(one.detach().double() - oracle) for one in (found, narrow)]
        print(f"{tuple(found.shape)}: ours {errors[0]:.2e}, published in bf16 {errors[1]:.2e}")
        assert 0 < errors[0] <= 1.5 * errors[1] < 0.01 * torch.linalg.matrix_norm(oracle)
    oracle = AdamW([{"params": rest[:1]}, {"params": rest[1:], "weight_decay": 0.0}], **HYPERPARAMETERS)
    for step in range(10):
        for parameter, gradient in zip(rest, gradients(step)[3:], strict=True):
            parameter.grad = gradient.double()
        oracle.step()
    for found, one in zip(ours[3:], rest, strict=True):
        torch.testing.assert_close(found.double(), one.float().double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [("torch", torch.float32), ("fused", torch.bfloat16)])
def test_a_saved_state_resumes_with_the_same_bits_and_a_scale_of_nan_skips(kind, dtype):
    whole, params = parameters(dtype), parameters(dtype)
    run(make(kind, whole), whole, range(5))
    optimizer = make(kind, params)
    run(optimizer, params, range(3))
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in params]
    again = make(kind, resumed)
    run(again, resumed, range(1))  # of which nothing stays
    for parameter, saved in zip(resumed, params, strict=True):
        parameter.data.copy_(saved)
    again.load_state_dict(optimizer.state_dict())
    run(again, resumed, range(3, 5))
    assert same_bits(resumed, whole)
    if kind == "fused":  # in fp32 nothing is rounded at random
        one, other = parameters(torch.float32), parameters(torch.float32)
        run(make("torch", one), one, range(2))
        run(make("fused", other), other, range(2))
        assert same_bits(one[:3], other[:3])
    states = again.state[resumed[0]]
    assert states.keys() == {"step", "momentum_buffer"} and states["momentum_buffer"].dtype == dtype
    assert states["step"] == 5
    if kind == "fused":
        run(again, resumed, range(5, 6), grad_scale=torch.tensor(math.nan, device=DEVICE))
        assert same_bits(resumed, whole) and states["step"] == 5 and states["momentum_buffer"].isfinite().all()


def test_bf16_is_right_on_average_where_each_update_is_lost_to_the_nearest():
    """Of 64 x 64 weights of 1, whose lower neighbour is 1/256 away, and ten updates of about 1e-3."""

    def mean_change(kind: str) -> float:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16, device=DEVICE))
        optimizer = class_of(kind)[0]([{"params": [weight], MUON: True}], lr=1e-3, weight_decay=1.0)
        weight.grad = torch.zeros_like(weight)  # decay alone
        for _ in range(10):
            optimizer.step()
        return 1 - weight.float().mean().item()

    assert mean_change("torch") == 0
    expected = 1 - (1 - 1e-3) ** 10
    # Each of 4,096 weights moves by 1/256 with probability about 10 x 0.256 in all: five standard deviations.
    assert abs(mean_change("fused") - expected) < 5 / 256 * (10 * 0.256 / 4096) ** 0.5


def test_blocks_matrices_are_muons_and_all_else_is_adamws():
    config = MODEL_SIZES["tiny"]
    model = nn.Module()
    model.module = TransformerLM(config, device="meta")
    blocks, others, vectors = muon_groups(model, decay_vectors=False)
    assert sum(p.numel() for p in blocks["params"]) == config.n_layers * config.n_block_matrices and blocks[MUON]
    assert [tuple(p.shape) for p in others["params"]] == [(config.vocab_size, config.d_model)] * 2
    assert all(p.dim() == 1 for p in vectors["params"]) and vectors["weight_decay"] == 0.0
    assert len(vectors["params"]) == 2 * config.n_layers + 1
    with pytest.raises(ValueError, match=r"Muon updates matrices, got a parameter of shape \(20,\)"):
        TorchMuon([{"params": parameters(torch.float32), MUON: True}])
