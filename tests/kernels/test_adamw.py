"""AdamW in one pass against the formula in fp64, and the properties of stochastic rounding: unbiased, reproducible, the
same for shards and for the whole, silent where nothing needs rounding."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.kernels.adamw import BLOCK, CHUNK, Update, UpdateTable, adamw_
from cs336_systems.training import AdamW
from tests.kernels.against_fp64 import check, check_refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
HYPERPARAMETERS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}
N = 2**13
SIGMAS = 5
"""Of a binomial count: passed by chance once in 1.7 million, and the seeds are fixed."""


def make(size: int, dtypes: Sequence[torch.dtype], values: int = 0, **fields) -> Update:
    """Normal values, a positive second moment, at step 3."""
    generator = torch.Generator().manual_seed(values)
    p, g, m, v = (torch.randn(size, generator=generator) for _ in range(4))
    tensors = [x.to(DEVICE, dtype) for x, dtype in zip((p, g, 0.1 * m, v.square()), (*dtypes, dtypes[2]), strict=True)]
    step = torch.tensor(3, device=DEVICE)
    return Update(*tensors, step, **(HYPERPARAMETERS | fields))


def tensors_of(update: Update) -> list[Tensor]:
    return [update.parameter, update.exp_avg, update.exp_avg_sq]


def copy(update: Update, **fields) -> Update:
    return update._replace(**dict(zip(Update._fields, (x.clone() for x in update[:5]), strict=False)) | fields)


def same_bits(left: Update, right: Update) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(left), tensors_of(right), strict=True))


def eager(update: Update, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """What the reference makes of it in a dtype: parameter and moments."""
    parameter = nn.Parameter(update.parameter.to(dtype, copy=True))
    parameter.grad = update.gradient.to(dtype) * scale
    lr, betas, eps, weight_decay = update[5:9]
    optimizer = AdamW([parameter], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    moments = {"exp_avg": update.exp_avg.to(dtype, copy=True), "exp_avg_sq": update.exp_avg_sq.to(dtype, copy=True)}
    optimizer.state[parameter] = {"step": update.step.item(), **moments}
    optimizer.step()
    return [parameter.detach(), *moments.values()]


@pytest.mark.parametrize("size", [7, CHUNK + BLOCK + 1])
def test_one_step_in_fp32(size: int) -> None:
    """Twice eager's error and two ulp: one product more (the scale), and the hardware's root and division."""
    update = make(size, (FP32, FP32, FP32))
    truth, other = eager(update, torch.float64, 0.25), eager(update, FP32, 0.25)
    adamw_([update], torch.tensor(0.25, device=DEVICE))
    assert update.step == 4
    for name, actual, rival, exact in zip(("p", "m", "v"), tensors_of(update), other, truth, strict=True):
        check(name, actual, rival, exact, 2 * torch.finfo(FP32).eps * exact.abs().max())


@pytest.mark.parametrize("dtypes", [(BF16, BF16, FP32), (FP32, BF16, BF16)])
def test_what_is_bf16_is_a_neighbour_of_the_exact_value(dtypes: tuple[torch.dtype, ...]) -> None:
    update = make(2 * BLOCK + 3, dtypes)
    truth = eager(update, torch.float64)
    adamw_([update])
    for name, actual, exact in zip(("p", "m", "v"), tensors_of(update), truth, strict=True):
        spacing = torch.finfo(actual.dtype).eps * 2.0 ** exact.abs().log2().floor()
        arithmetic = 8 * torch.finfo(FP32).eps * exact.abs().max()
        excess = ((actual.double() - exact).abs() - spacing).max().item()
        print(f"{name} {dtypes}: beyond a neighbour by {excess:.2e}, allowed {arithmetic:.2e}")
        assert excess <= arithmetic


def test_a_master_is_updated_as_a_parameter_in_fp32_is_and_the_parameter_is_what_it_rounds_to() -> None:
    wide = make(2 * BLOCK + 3, (FP32, BF16, BF16))
    narrow = copy(wide, parameter=wide.parameter.bfloat16(), master=wide.parameter.clone())
    for update in (wide, narrow):
        adamw_([update])
    assert torch.equal(narrow.master, wide.parameter)
    assert torch.equal(narrow.exp_avg, wide.exp_avg)
    assert torch.equal(narrow.exp_avg_sq, wide.exp_avg_sq)
    assert torch.equal(narrow.parameter, narrow.master.bfloat16())


def test_many_tensors_are_the_tensors_alone() -> None:
    """Of whatever hyperparameters; where the scale is not finite nothing changes."""
    own = [{"lr": 0.1}, {"weight_decay": 0.0}, {"betas": (0.5, 0.6)}, {"eps": 1e-8}, {}]
    sizes = [0, 7, BLOCK + 3, CHUNK + 5, 9]
    alone = [make(n, (BF16, BF16, BF16), i, number=i, seed=i % 2, **own[i]) for i, n in enumerate(sizes)]
    together = [copy(update) for update in alone]
    for scale in (math.inf, math.nan):
        adamw_(together, torch.tensor(scale, device=DEVICE))
        assert all(map(same_bits, together, alone)) and all(update.step == 3 for update in together)
    adamw_(together)
    for update, other in zip(together, alone, strict=True):
        adamw_([other])
        assert same_bits(update, other) and update.step == 4


def count_is_binomial(hits: Tensor, probability: float) -> bool:
    n, k = hits.numel(), hits.sum().item()
    sigma = math.sqrt(n * probability * (1 - probability))
    print(f"{k} of {n}, expected {n * probability:.0f} +- {sigma:.0f}")
    return abs(k - n * probability) <= SIGMAS * sigma


def constant(values: Sequence[float], n: int = N, **fields) -> Update:
    tensors = [torch.full((n,), value, dtype=BF16, device=DEVICE) for value in values]
    return Update(*tensors, torch.tensor(0, device=DEVICE), **fields)


def test_rounding_of_parameters_is_unbiased_in_both_directions_of_zero() -> None:
    """(1 - 1/1024) of 1 lies a quarter of the way from 1 to the neighbour below, 1 - 1/256."""
    for sign in (1.0, -1.0):
        update = constant((sign, 0, 0, 0), lr=0.5, betas=(0.9, 0.99), eps=1e-8, weight_decay=2**-9)
        adamw_([update])
        down = update.parameter == sign * (1 - 2**-8)
        assert (down | (update.parameter == sign)).all()
        assert count_is_binomial(down, 0.25)


@pytest.mark.slow
def test_a_representable_value_is_never_moved() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).to(DEVICE)
    if DEVICE == "cpu":  # a third is quicker, and Triton's interpreter reads denormals wrongly
        every = every[::3][(every[::3] == 0) | (every[::3].abs() >= torch.finfo(BF16).tiny) | every[::3].isnan()]
    zeros = torch.zeros_like(every)
    update = Update(
        every.clone(), zeros, zeros.clone(), zeros.clone(), torch.tensor(0, device=DEVICE), **HYPERPARAMETERS
    )
    adamw_([update._replace(lr=0.0)])
    torch.testing.assert_close(update.parameter, every, rtol=0, atol=0, equal_nan=True)
    assert not update.exp_avg.any()
    assert not update.exp_avg_sq.any()


@pytest.mark.slow
def test_runs_repeat_to_the_bit_and_differ_by_seed_number_and_step() -> None:
    first = make(3000, (BF16, BF16, BF16))
    original, table = copy(first), UpdateTable()
    adamw_([first], table=table)
    again = copy(original)
    adamw_([again], table=table)
    assert same_bits(first, again)
    # the moments' correction depends on the step, the second moment itself does not
    for fields in ({"seed": 1}, {"seed": 2**40}, {"number": 1}, {"offset": 2}, {"step": original.step + 1}):
        other = copy(original, **fields)
        adamw_([other])
        differing = (other.exp_avg_sq != first.exp_avg_sq).float().mean().item()
        print(f"{fields}: {differing:.0%} of second moments differ")
        assert 0.2 < differing < 0.5  # 2 q (1 - q) of each, 1/3 on average over q


def philox(key: int, counter: tuple[int, int, int, int], rounds: int = 7) -> tuple[int, int, int, int]:
    """Philox-4x32 as Salmon et al. 2011 write it down, figure 4 and table 2."""
    c0, c1, c2, c3 = counter
    k0, k1, mask = key % 2**32, key >> 32, 2**32 - 1
    for _ in range(rounds):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & mask, left >> 32 ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def test_random_bits_are_philoxs() -> None:
    """By blocks and by elements; m and v lie 32,768 and 32,896 of 65,536 parts of the way to their upper neighbours."""
    n, offset = BLOCK + 100, 2**33 + 6
    fields = {"seed": 2**40 + 5, "number": 9, "offset": offset}
    update = constant((1, 1 + 2**-7, 1, 1), n, lr=0.0, betas=(0.5, 0.75), eps=1e-8, weight_decay=0.0, **fields)
    update.step.fill_(6)
    adamw_([update])
    for i in [*range(20), *range(BLOCK - 10, BLOCK + 10), n - 1]:
        pair = (offset + i) // 2
        words = philox(fields["seed"], (pair % 2**32, pair >> 32, 7, fields["number"]))
        assert (update.exp_avg[i] > 1) == (words[i % 2] >> 16 >= 32768)
        assert (update.exp_avg_sq[i] > 1) == ((words[2] >> 16 * (i % 2) & 0xFFFF) + 32896 >= 65536)


@pytest.mark.parametrize("cut", [BLOCK, 1001])
def test_two_shards_are_the_whole_to_the_bit(cut: int) -> None:
    """Even and odd places, aligned or not: the paths by blocks and by elements draw the same bits."""
    whole = make(2 * BLOCK + 100, (BF16, BF16, BF16), number=3)
    parts = copy(whole)
    shards = [
        parts._replace(
            **{name: getattr(parts, name)[a:b] for name in Update._fields[:4]}, step=parts.step.clone(), offset=a
        )
        for a, b in ((0, cut), (cut, None))
    ]
    for _ in range(2):
        adamw_([whole])
        adamw_(shards)
        assert same_bits(whole, parts)


def test_refusals() -> None:
    update = make(8, (BF16, BF16, BF16), number=5)
    twice = make(16, (BF16, BF16, BF16), number=5)
    narrow = update._replace

    def step(*updates: Update, scale: Tensor | None = None) -> Callable[[], None]:
        return lambda: adamw_(list(updates), scale)

    check_refused(
        (step(narrow(gradient=update.gradient.half())), "tensor 5 has .*float16"),
        (step(narrow(exp_avg=update.exp_avg.float())), "each the same for all tensors.* tensor 5"),
        (step(narrow(gradient=update.gradient[:4])), r"gradient of tensor 5 .* \(8,\) .* but is \(4,\)"),
        (step(narrow(gradient=twice.gradient[::2])), r"gradient of tensor 5 .* with strides \(2,\)"),
        (step(narrow(step=torch.zeros((), device=DEVICE))), "step of tensor 5 must be one int64"),
        (step(narrow(master=update.parameter)), r"master of tensor 5 .* torch\.bfloat16"),
        (step(make(3, (FP32, FP32, FP32)), update), r"the first .*float32"),
        (step(update, scale=torch.ones(2, device=DEVICE)), r"scale .* shape \(2,\)"),
    )


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    def test_beyond_31_bits(self) -> None:
        n = 2**31 + 3 * CHUNK + 5
        update = constant((1, 0, 0, 0), n, lr=0.5, betas=(0.9, 0.99), eps=1e-8, weight_decay=2**-9)
        adamw_([update])
        end = constant((1, 0, 0, 0), 2 * CHUNK + 5, lr=0.5, betas=(0.9, 0.99), eps=1e-8, weight_decay=2**-9)
        adamw_([end._replace(offset=n - 2 * CHUNK - 5)])
        assert torch.equal(update.parameter[-2 * CHUNK - 5 :], end.parameter)
        assert count_is_binomial(update.parameter[: 2**30] == 1 - 2**-8, 0.25)

    def test_nobody_waits_and_a_thousand_tensors_take_two_launches(self) -> None:
        updates = [make(100 + i, (BF16, BF16, BF16), number=i) for i in range(1000)]
        table, scale = UpdateTable(), torch.ones((), device=DEVICE)
        adamw_(updates, scale, table=table)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                adamw_(updates, scale, table=table)
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        kernels = [event.name for event in profile.events() if "kernel" in event.name]
        assert kernels == ["advance_kernel", "update_kernel"]

    def test_a_graph_counts_its_steps(self) -> None:
        plain, captured = (make(5 * BLOCK + 3, (BF16, BF16, BF16)) for _ in range(2))
        table = UpdateTable()
        adamw_([captured], table=table)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            adamw_([captured], table=table)
        for _ in range(3):
            graph.replay()
        for _ in range(4):
            adamw_([plain])
        assert same_bits(plain, captured)
        assert captured.step == 7
