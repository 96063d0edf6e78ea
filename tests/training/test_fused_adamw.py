"""The fused AdamW as an optimizer: beside the reference over many steps, groups, clipping, and states that resume."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.kernels.grad_norm import grad_norm
from cs336_systems.training import AdamW
from cs336_systems.training.fused_adamw import FusedAdamW
from tests.kernels.against_fp64 import check_refused, error
from tests.training import shared
from tests.training.shared import flat, run, same_bits, set_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(7, 5), (3,), (), (0,), (2, 3, 4), (1100,)]


def parameters(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return shared.parameters(shapes, dtype, DEVICE)


def scale_to(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which clipping multiplies gradients; NaN where they are not finite."""
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), math.nan)


def groups(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.4, "betas": (0.5, 0.6)}]


def test_ten_steps_in_fp32_are_as_exact_as_the_reference() -> None:
    """Against fp64: at most twice the reference's error in fp32, and an ulp of the largest weight.

    A parameter without a gradient is left alone and counts its own steps, and a gradient that is not finite skips one.
    """
    exact = parameters(torch.float64)
    for parameter, narrow in zip(exact, parameters(FP32), strict=True):
        parameter.data.copy_(narrow)
    ours, theirs = parameters(FP32), parameters(FP32)
    oracle = AdamW(groups(exact), lr=0.01)
    pairs = [(FusedAdamW(groups(ours), lr=0.01), ours), (AdamW(groups(theirs), lr=0.01), theirs)]
    for step in range(10):
        for params in (exact, ours, theirs):
            set_gradients(params, step)
            if step == 4:
                params[1].grad = None
        if step == 6:
            before, ours[0].grad[0, 0] = [parameter.detach().clone() for parameter in ours], math.inf
            pairs[0][0].step(grad_scale=scale_to(grad_norm([parameter.grad for parameter in ours]), 1.0))
            assert same_bits(ours, before)
            set_gradients(ours, step)
        for optimizer in (oracle, *(optimizer for optimizer, _ in pairs)):
            optimizer.step()
    assert [pairs[0][0].state[ours[i]]["step"].item() for i in (0, 1)] == [10, 9]
    found, reference = (error(flat(params), flat(exact)) for _, params in pairs)
    assert found <= 2 * reference + torch.finfo(FP32).eps * flat(exact).abs().max()


@pytest.mark.slow
def test_a_saved_state_resumes_with_the_same_bits() -> None:
    state_dtype = FP32
    whole = parameters(BF16)
    run(FusedAdamW(groups(whole), seed=5, state_dtype=state_dtype), whole, range(5))

    params = parameters(BF16)
    optimizer = FusedAdamW(groups(params), seed=5, state_dtype=state_dtype)
    run(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True, map_location="cpu")
    resumed = [nn.Parameter(tensor.detach().to(DEVICE, copy=True)) for tensor in saved["params"]]
    optimizer = FusedAdamW(groups(resumed), state_dtype=state_dtype)  # the seed is in the saved groups
    optimizer.load_state_dict(saved["optimizer"])
    run(optimizer, resumed, range(3, 5))
    assert same_bits(resumed, whole)
    with pytest.raises(TypeError, match="its state_dict is"):
        copy.deepcopy(optimizer)
    for values in optimizer.state.values():
        assert values["exp_avg"].dtype == state_dtype


def test_shards_that_are_located_follow_the_whole_and_a_group_stepped_alone_keeps_its_numbers() -> None:
    whole, parts = parameters(BF16, [(40,), (30, 50)]), parameters(BF16, [(40,), (30, 50)])
    rows = [nn.Parameter(parts[1].detach()[a:b]) for a, b in ((0, 13), (13, 30))]
    first, second = FusedAdamW([parts[0], rows[0]]), FusedAdamW([rows[1]])
    first.locate(rows[0], 1)
    second.locate(rows[1], 1, 13 * 50)
    optimizer = FusedAdamW([{"params": [parameter]} for parameter in whole])
    every = optimizer.param_groups
    for step in range(3):
        set_gradients(whole, step)
        set_gradients(parts, step)
        for piece, (a, b) in zip(rows, ((0, 13), (13, 30)), strict=True):
            piece.grad = parts[1].grad[a:b]
        for group in every:  # as who sends one bucket while the next is updated
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = every
        first.step()
        second.step()
    assert same_bits(whole, parts)


def test_refusals() -> None:
    params, embedding = parameters(FP32), nn.Embedding(4, 2, sparse=True, device=DEVICE)
    embedding(torch.tensor([1], device=DEVICE)).sum().backward()
    check_refused(
        (lambda: FusedAdamW(params, betas=(1.0, 0.9)), r"\(1.0, 0.9\)"),
        (lambda: FusedAdamW(params, seed=-1), "got -1"),
        (lambda: FusedAdamW(params, state_dtype=torch.float16), "got torch.float16"),
        (lambda: FusedAdamW(params, offload=("gradients",)), "got gradients"),
        (lambda: FusedAdamW(parameters(torch.float64)), "got torch.float64"),
        (lambda: FusedAdamW(params).locate(torch.zeros(2), 0), r"of shape \(2,\)"),
        (lambda: FusedAdamW(embedding.parameters()).step(), "parameter 0 has one of layout torch.sparse_coo"),
    )
