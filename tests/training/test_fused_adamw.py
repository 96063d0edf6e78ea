"""The fused AdamW as an optimizer: beside the reference over many steps, groups, clipping, and states that resume."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.kernels import adamw_table, tensor_table
from cs336_systems.kernels.grad_norm import clip_scale, grad_norm
from cs336_systems.training import AdamW, TrainingCase, assemble, fused_adamw
from cs336_systems.training.fused_adamw import FusedAdamW
from tests.attention.offline import run_apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(7, 5), (3,), (), (0,), (2, 3, 4), (1100,)]


def parameters(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE, parameter.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, **kwargs) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step(**kwargs)


def flat(params: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in params])


def same_bits(left: list[nn.Parameter], right: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def groups(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.4, "betas": (0.5, 0.6)}]


def test_ten_steps_in_fp32_are_as_exact_as_the_reference() -> None:
    """Against fp64: at most twice the reference's error in fp32, and an ulp of the largest weight."""
    exact = parameters(torch.float64)
    for parameter, narrow in zip(exact, parameters(FP32), strict=True):
        parameter.data.copy_(narrow)
    ours, theirs = parameters(FP32), parameters(FP32)
    oracle = AdamW(groups(exact), lr=0.01)
    pairs = [(FusedAdamW(groups(ours), lr=0.01), ours), (AdamW(groups(theirs), lr=0.01), theirs)]
    for step in range(10):
        for optimizer, params in pairs:
            run(optimizer, params, range(step, step + 1))
        for parameter, twin in zip(exact, theirs, strict=True):
            parameter.grad = twin.grad.double()
        oracle.step()
    errors = [(flat(params) - flat(exact)).abs().max().item() for _, params in pairs]
    budget = 2 * errors[1] + torch.finfo(FP32).eps * flat(exact).abs().max().item()
    print(f"fused {errors[0]:.2e}, reference {errors[1]:.2e}, allowed {budget:.2e}")
    assert errors[0] <= budget


def test_states_have_the_parameters_dtype_or_their_own() -> None:
    params = [*parameters(BF16, [(5,)]), *parameters(FP32, [(6,)])]
    for state_dtype in (None, FP32, BF16):
        optimizer = FusedAdamW(params, state_dtype=state_dtype)
        run(optimizer, params, range(2))
        for parameter in params:
            state = optimizer.state[parameter]
            assert (state["step"].dtype, state["step"].item()) == (torch.int64, 2)
            assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {state_dtype or parameter.dtype}


def test_small_updates_of_bf16_add_up_only_if_rounded_stochastically() -> None:
    """32 updates of a sixteenth of the spacing below 1, 2^-8: two spacings on average, or none."""
    for stochastic, expected in ((True, 1 - 2**-7), (False, 1.0)):
        if not stochastic and DEVICE == "cpu":
            continue  # Triton's interpreter cuts off where a GPU rounds to nearest
        theta = nn.Parameter(torch.ones(1024, dtype=BF16, device=DEVICE))
        optimizer = FusedAdamW([theta], lr=2**-12, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(32):
            theta.grad = torch.ones_like(theta)
            optimizer.step()
        # a step's variance is at most a quarter of the spacing squared; five sigmas of the mean of 1,024
        assert theta.float().mean().item() == pytest.approx(expected, abs=5 * 2**-8 * math.sqrt(32 / 4 / 1024))


@pytest.mark.parametrize("state_dtype", [None, FP32])
def test_a_saved_state_resumes_with_the_same_bits(state_dtype) -> None:
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
    for values in optimizer.state.values():
        assert values["exp_avg"].dtype == (state_dtype or BF16)


def test_a_copied_optimizer_goes_on_alike() -> None:
    params = parameters(BF16)
    optimizer = FusedAdamW(params)
    optimizer.locate(params[0], 77, 3)
    run(optimizer, params, range(2))
    twin_params, twin = copy.deepcopy((params, optimizer))
    for one, its in ((optimizer, params), (twin, twin_params)):
        run(one, its, range(2, 4))
    assert same_bits(params, twin_params)


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


def test_clipping_is_torchs_and_a_bad_gradient_skips_the_step() -> None:
    ours, theirs = parameters(FP32), parameters(FP32)
    fused, reference = FusedAdamW(ours, lr=0.01), AdamW(theirs, lr=0.01)
    for step in range(4):
        set_gradients(ours, step)
        if step == 2:
            before = [parameter.detach().clone() for parameter in ours]
            ours[0].grad[0, 0] = math.inf
        fused.step(grad_scale=clip_scale(grad_norm([parameter.grad for parameter in ours]), 0.5))
        if step == 2:
            assert same_bits(ours, before)
            continue
        set_gradients(theirs, step)
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        reference.step()
    # Gradients clipped beforehand are rounded once more, and so are three updates of at most lr each.
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-6, atol=3 * 0.01 * 1e-5)
    assert fused.state[ours[0]]["step"] == 3


def test_what_is_stepped_in_many_parts_is_described_to_the_device_once(monkeypatch) -> None:
    params = parameters(BF16, [(8,)] * 70)
    optimizer = FusedAdamW(params)
    copied: list[Tensor] = []
    to_device = tensor_table.to_device

    def counted(values: Tensor, device: torch.device) -> Tensor:
        copied.append(values)
        return to_device(values, device)

    for module in (tensor_table, adamw_table):
        monkeypatch.setattr(module, "to_device", counted)

    def step(parts: list[list[nn.Parameter]]) -> int:
        """Copies of a step of one part after the other, as ``ShardedOptimizer`` makes."""
        copied.clear()
        for part in parts:
            optimizer.param_groups[0]["params"] = part
            optimizer.step()
        optimizer.param_groups[0]["params"] = params
        return len(copied)

    set_gradients(params, 0)
    buckets = [[param] for param in params]
    assert step(buckets) > 0
    assert step(buckets) == 0
    monkeypatch.setattr(fused_adamw, "MAX_DESCRIPTIONS", 3)
    for gap in range(5):  # ever other sets take no more memory than so many of all parameters
        step([params[:gap] + params[gap + 1 :]])
        assert 0 < sum(map(len, optimizer._tables)) <= 3 * len(params)


def test_gradients_can_be_cleared_in_the_same_pass() -> None:
    params = parameters(BF16)
    run(FusedAdamW(params, clear_gradients=True), params, range(1))
    assert not any(parameter.grad.any() for parameter in params)


def test_parameters_without_gradients_are_left_alone_and_count_their_own_steps() -> None:
    ours, theirs = parameters(FP32), parameters(FP32)
    pairs = (FusedAdamW(ours, lr=0.1), ours), (AdamW(theirs, lr=0.1), theirs)
    for optimizer, params in pairs:
        set_gradients(params, 0)
        params[1].grad = None
        optimizer.step()
        assert params[1] not in optimizer.state
        run(optimizer, params, range(1, 3))
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-6)


def test_a_step_raises_the_versions_of_what_it_writes() -> None:
    params = parameters(BF16)
    optimizer, before = FusedAdamW(params), [parameter._version for parameter in params]
    set_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    raised = [parameter._version > version for parameter, version in zip(params, before, strict=True)]
    assert raised == [i != 1 for i in range(len(params))]


def test_where_new_tensors_lie_by_default_changes_nothing() -> None:
    kinds = []
    for default in ("cpu", "meta"):
        params = parameters(BF16)
        set_gradients(params, 0)
        with torch.device(default):
            norm = grad_norm(params)
            FusedAdamW(params).step(grad_scale=clip_scale(norm, 1.0))
        kinds.append(params)
    assert same_bits(*kinds)


def test_a_transposed_parameter_is_updated_where_it_lies() -> None:
    ours, theirs = (nn.Parameter(torch.arange(12.0, device=DEVICE).view(3, 4).t()) for _ in range(2))
    for optimizer, parameter in ((FusedAdamW([ours], lr=0.1), ours), (AdamW([theirs], lr=0.1), theirs)):
        parameter.square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_a_closure_and_a_schedule() -> None:
    theta = nn.Parameter(torch.tensor([3.0, -2.0], device=DEVICE))
    optimizer = FusedAdamW([theta], lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 13.0
    after = theta.detach().clone()
    torch.testing.assert_close(after.cpu(), torch.tensor([2.9, -1.9]))
    schedule.step()
    optimizer.step(closure)
    assert torch.equal(theta, after)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="betas must lie in"):
        FusedAdamW(parameters(FP32), betas=(1.0, 0.9))
    with pytest.raises(ValueError, match=r"seed must lie in 0\.\.2\^63-1, got -1"):
        FusedAdamW(parameters(FP32), seed=-1)
    with pytest.raises(ValueError, match=r"state_dtype must be .*, got torch\.float16"):
        FusedAdamW(parameters(FP32), state_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"takes bf16 and fp32 parameters, got torch\.float64"):
        FusedAdamW(parameters(torch.float64))
    with pytest.raises(ValueError, match=r"of shape \(2,\) is none of this optimizer's"):
        FusedAdamW(parameters(FP32)).locate(torch.zeros(2), 0)
    embedding = nn.Embedding(4, 2, sparse=True, device=DEVICE)
    embedding(torch.tensor([1], device=DEVICE)).sum().backward()
    with pytest.raises(ValueError, match=r"gradients must be dense, parameter 0 has one of layout torch\.sparse_coo"):
        FusedAdamW(embedding.parameters()).step()


@pytest.mark.slow
def test_a_cpu_is_told_which_device_is_needed() -> None:
    """In a process where Triton does not interpret."""
    code = """
import torch
from cs336_systems.training import TrainingCase, assemble
from cs336_systems.training.fused_adamw import FusedAdamW
for make in (lambda: FusedAdamW([torch.ones(1)]), lambda: assemble(TrainingCase(size="tiny", optimizer="fused"))):
    try:
        make()
    except ValueError as error:
        print(error)
"""
    assert run_apart(code) == "optimizer fused is a Triton kernel and needs a CUDA device, got cpu\n" * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_in_bf16_learns_like_one_in_fp32() -> None:
    losses = {}
    for dtype in ("fp32", "bf16"):
        step = assemble(TrainingCase(device="cuda", size="tiny", context_length=64, dtype=dtype, optimizer="fused"))
        ids = torch.randint(100, (2, 4, 64), generator=torch.Generator().manual_seed(0)).cuda()
        losses[dtype] = [step(*ids).item() for _ in range(30)]
    drop = {dtype: series[0] - series[-1] for dtype, series in losses.items()}
    assert drop["bf16"] == pytest.approx(drop["fp32"], rel=0.1)


def test_steps_note_the_largest_magnitudes_of_what_they_write() -> None:
    """Where one launch has all who share a place."""
    params = parameters(BF16)
    places = {torch.full((), 1e6, device=DEVICE): shared for shared in (params[:2], params[4:])}
    optimizer = FusedAdamW(groups(params), lr=0.1)
    optimizer.note_maxima(places)
    assert not optimizer.noted
    for step in range(2):
        run(optimizer, params, range(step, step + 1))
        assert optimizer.noted == places.keys()
        for place, shared in places.items():
            assert place == max(parameter.abs().max().item() for parameter in shared)
    set_gradients(params, 2)
    params[1].grad = None
    optimizer.step()
    assert optimizer.noted == {place for place, shared in places.items() if shared[0] is params[4]}
    plain = parameters(BF16)
    without = FusedAdamW(groups(plain), lr=0.1)
    run(without, plain, range(2))
    set_gradients(plain, 2)
    plain[1].grad = None
    without.step()
    assert same_bits(params, plain)
    away = FusedAdamW(params, lr=0.1, offload=("exp_avg",))
    away.note_maxima(places)
    run(away, params, range(1))
    assert not away.noted
