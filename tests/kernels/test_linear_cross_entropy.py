"""Head and loss in chunks, plain and fused, against full logits in fp64: values, gradients, memory, refusals."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.kernels.cross_entropy_rows import launch_rows
from cs336_systems.kernels.linear_cross_entropy import FUSED_ROWS, IGNORED, default_chunk
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy as of_either
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy_forward_backward as both_of_either
from tests.kernels.against_fp64 import check, check_refused, error
from tests.modes import Largest

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
DTYPES = {False: [torch.float64, torch.float32, torch.bfloat16], True: [torch.float32, torch.bfloat16]}
"""Plain and fused; Triton's interpreter is right with bf16 here, where the kernel has no products."""
public, linear_cross_entropy_forward_backward = partial(of_either, fused=True), partial(both_of_either, fused=True)
EITHER = pytest.mark.parametrize("fused", DTYPES, ids=["plain", "fused"])


class Results(NamedTuple):
    """In the order of ``linear_cross_entropy_forward_backward``."""

    loss: Tensor
    dx: Tensor
    dweight: Tensor
    lse: Tensor


def make(n_tokens: int, n_words: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """x, weight and targets, every third of which does not count, if there are so many; logits of variance 4."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_tokens, d, generator=generator)
    weight = torch.randn(n_words, d, generator=generator) * 2 * d**-0.5
    targets = torch.randint(n_words, (n_tokens,), generator=generator)
    targets[2::3] = IGNORED
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), targets.to(DEVICE)


def formula(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, dtype: torch.dtype | None = None
) -> Results:
    """Full logits and autograd; the loss in fp32 or above, as everyone has it."""
    x, weight = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight))
    logits = x @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = torch.logsumexp(logits, dim=-1)
    counts = targets != IGNORED
    loss = F.cross_entropy(logits, targets) + z_loss * lse[counts].square().mean()
    return Results(loss.detach(), *torch.autograd.grad(loss, (x, weight)), lse.detach())


def check_all(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
    fused: bool = True,
    from_host: bool = False,
) -> None:
    """Against full logits in fp64 and in the same dtype; ``from_host``, targets are given on the CPU, to autograd.

    The floor rounds each term of a sum once, and the sum over chunks once per chunk; an exponential carries the
    rounding of its fp32 argument, logits times log2(e).
    """
    how: dict[str, Any] = {"z_loss": z_loss, "chunk": chunk, "fused": fused}
    if from_host:
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = of_either(*leaves, targets.cpu(), **how)
        got = loss.detach(), *torch.autograd.grad(loss, leaves)
    else:
        got = both_of_either(x, weight, targets, **how)
    exact, eager = formula(x, weight, targets, z_loss, torch.float64), formula(x, weight, targets, z_loss)
    wide = torch.promote_types(x.dtype, torch.float32)
    assert [t.dtype for t in got] == [wide, x.dtype, weight.dtype, wide][: len(got)]
    logits = x.double() @ weight.double().t()
    one_hot = F.one_hot(targets.clamp(min=0), len(weight))
    n_counting = (targets != IGNORED).sum()
    terms = (logits.softmax(-1) + one_hot) * (targets != IGNORED)[:, None] / n_counting
    in_exponent = 4 * torch.finfo(torch.float32).eps * max(1.0, logits.abs().max().item())
    per_term = torch.finfo(x.dtype).eps + in_exponent
    n_chunks = -(-len(x) // (chunk or len(x)))
    floors = Results(
        torch.tensor(in_exponent * (1 + z_loss * exact.lse.abs().max().item())),
        per_term * (terms @ weight.double().abs()),
        per_term * n_chunks * (terms.t() @ x.double().abs()),
        torch.tensor(in_exponent),
    )
    for name, *of in zip(Results._fields, got, eager, exact, (floor.max() for floor in floors), strict=False):
        check(name, *of)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("shape", "chunk", "z_loss"),
    [((1, 1, 3), None, 0.0), ((13, 101, 16), 5, 0.01), ((7, 5003, 8), 3, 0.0), ((5, 33001, 8), 4, 0.01)],
)
@EITHER
def test_values_and_gradients(shape: tuple[int, int, int], chunk: int | None, z_loss: float, fused: bool) -> None:
    for dtype in DTYPES[fused]:
        inputs = make(*shape, dtype)
        check_all(*inputs, z_loss=z_loss, chunk=chunk, fused=fused)
    check_all(100 * inputs[0], *inputs[1:], chunk=chunk, fused=fused)  # logits whose exponentials overflow
    transposed = [*(t.t().contiguous().t() for t in inputs[:2]), torch.stack((inputs[2],) * 2, dim=-1)[:, 0]]
    pairs = (both_of_either(*tensors, chunk=chunk, fused=fused) for tensors in (inputs, transposed))
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected)


def test_the_chunk_is_chosen_by_the_bytes_of_its_logits() -> None:
    assert default_chunk(32768, 151_936, 2) == 2048
    assert default_chunk(32768, 151_936, 4) == 1024
    assert default_chunk(30000, 50_257, 2) == 6144  # five of them, where 6,656 would fit
    assert default_chunk(500, 10_000, 2) == 512
    assert default_chunk(5000, 10**7, 4) == default_chunk(0, 10, 4) == 256


@pytest.mark.usefixtures("poisoned")
@EITHER
def test_where_no_target_counts_the_mean_is_nan_and_gradients_are_zero(fused: bool) -> None:
    for n_tokens in (0, 4):
        x, weight, targets = make(n_tokens, 10, 3)
        none = torch.full_like(targets, IGNORED)
        loss, dx, dweight, lse = both_of_either(x, weight, none, fused=fused)
        assert loss.isnan() and lse.shape == (n_tokens,)
        assert not dx.any() and dx.shape == x.shape and not dweight.any()
        assert of_either(x, weight, none, reduction="sum", fused=fused) == 0


@pytest.mark.usefixtures("poisoned")
@EITHER
def test_of_targets_on_the_cpu_ignored_ones_cost_no_products(fused: bool) -> None:
    """Where all count, to the bit as all rows; where none does, zero."""
    n_tokens, n_words, d = 300, 50, 16
    x, weight, targets = make(n_tokens, n_words, d)
    targets[:120] = IGNORED
    how: dict[str, Any] = {"z_loss": 0.01, "chunk": 100, "fused": fused}
    check_all(x, weight, targets, **how, from_host=True)
    leaves = x.view(3, 100, d).requires_grad_(), weight.requires_grad_()
    for n_counting, given in ((120, targets), (300, targets.abs() % n_words), (0, torch.full_like(targets, IGNORED))):
        with FlopCounterMode(display=False) as counter:
            loss = of_either(*leaves, given.cpu().view(3, 100), **how)
        n_rows = -(-n_counting // FUSED_ROWS) * FUSED_ROWS if fused else n_counting
        assert counter.get_total_flops() == 6 * min(n_rows, n_tokens) * n_words * d
        dx, dweight = (t.flatten(0, -2) for t in torch.autograd.grad(loss, leaves))
        assert not dx[given == IGNORED].any() and dx[given != IGNORED].any(1).all()
        if n_counting == n_tokens:
            every_row = both_of_either(x, weight, given, **how)
            assert all(torch.equal(*pair) for pair in zip((loss, dx, dweight), every_row, strict=False))
    assert loss.isnan() and not dweight.any()
    assert of_either(x, weight, given.cpu(), reduction="sum", fused=fused) == 0


@EITHER
def test_micro_batches_share_a_denominator_and_gradients_add_up_where_they_lie(fused: bool) -> None:
    x, weight, targets = make(10, 40, 8)
    loss, dx, dweight, _ = both_of_either(x, weight, targets, fused=fused)
    n_counting, before = (targets != IGNORED).sum(), torch.randn_like(weight)
    grad_weight = before.clone()
    parts = [
        both_of_either(x_M, weight, t_M, grad_weight=grad_weight, denominator=n_counting, chunk=3, fused=fused)
        for x_M, t_M in zip(x.split(4), targets.split(4), strict=True)
    ]
    assert all(part[2] is grad_weight for part in parts)
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), dx)
    torch.testing.assert_close(grad_weight, before + dweight)


def test_no_more_logits_exist_than_those_of_a_chunk() -> None:
    x, weight, targets = (t.requires_grad_(t.is_floating_point()) for t in make(64, 40, 2))
    for function, n_tokens in ((partial(of_either, chunk=8, fused=False), 8), (lambda *of: formula(*of)[0], 64)):
        with Largest() as largest:
            function(x, weight, targets)
        assert largest.n_elements == n_tokens * 40


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@EITHER
def test_autograd_scales_by_the_arriving_gradient(reduction: str, fused: bool) -> None:
    public = partial(of_either, fused=fused)
    x, weight, targets = (t.requires_grad_(t.is_floating_point()) for t in make(12, 50, 8))
    x_BSD, targets_BS = x.view(3, 4, 8), targets.view(3, 4)
    loss = public(x_BSD, weight, targets_BS, reduction=reduction, chunk=5)
    expected = F.cross_entropy(x @ weight.t(), targets, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(3.0 * expected, (x, weight))
    # Logits of 4 to 8 are off by up to 2^-22 in either, and so is a probability, relatively; all is tripled.
    atol = 3 * 2**-21 * float(weight.detach().abs().max())
    for retain_graph in (True, False):  # the second time as the first
        for a, b in zip(torch.autograd.grad(3.0 * loss, (x, weight), retain_graph=retain_graph), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)
    for wanted_alone, gradient in ((0, wanted[0]), (1, wanted[1])):
        leaves = [t.detach().requires_grad_(i == wanted_alone) for i, t in enumerate((x_BSD, weight))]
        loss = 3.0 * public(*leaves, targets_BS, reduction=reduction, chunk=5)
        found = torch.autograd.grad(loss, leaves[wanted_alone])[0]
        torch.testing.assert_close(found.view_as(gradient), gradient, rtol=1e-5, atol=atol)
    with torch.no_grad():
        torch.testing.assert_close(public(x_BSD, weight, targets_BS, reduction=reduction, chunk=5), expected.detach())


@EITHER
def test_a_second_micro_batch_adds_to_the_weights_gradient(fused: bool) -> None:
    """To half of what the first one gave, in the memory that it has; ``torch.autograd.grad`` leaves it as it is."""
    x, weight, targets = (t.requires_grad_(t.is_floating_point()) for t in make(12, 50, 8))
    once = formula(x, weight, targets).dweight
    (0.5 * of_either(x, weight, targets, chunk=5, fused=fused)).backward()
    first = weight.grad
    assert first is not None
    loss = 0.25 * of_either(x, weight, targets, chunk=5, fused=fused)
    torch.testing.assert_close(torch.autograd.grad(loss, weight, retain_graph=True)[0], 0.25 * once)
    torch.testing.assert_close(first, 0.5 * once)
    loss.backward()
    assert weight.grad is first
    torch.testing.assert_close(first, 0.75 * once)
    seen = []
    weight.register_hook(seen.append)
    (0.25 * of_either(x, weight, targets, chunk=5, fused=fused)).backward()
    torch.testing.assert_close(seen[0], 0.25 * once)
    torch.testing.assert_close(weight.grad, once)


@pytest.mark.parametrize("wrong", [-1, 2**40])
def test_targets_out_of_range_are_refused_or_make_nan(wrong: int) -> None:
    x, weight, _ = make(3, 11, 4)
    targets = torch.tensor([0, wrong, 10], device=DEVICE)
    if not ON_CUDA:
        with pytest.raises(ValueError, match=rf"target {wrong} is neither in \[0, 11\) nor -100"):
            of_either(x, weight, targets, fused=False)
    logits = torch.full((3, 16), -torch.inf, device=DEVICE)[:, :11]
    logits.copy_(x @ weight.t())
    losses, lse = torch.empty(2, 3, device=DEVICE)
    options = {"scale": torch.ones((), device=DEVICE), "z_loss": 0.0, "gradient": True}
    launch_rows(logits, targets, losses, lse, **options)
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.isnan().all(1).tolist() == [False, True, False]
    assert logits.isfinite().all(1).tolist() == [True, False, True]
    assert lse.isfinite().all()


def test_refusals() -> None:
    x, weight, targets = make(3, 11, 4)
    wrong = linear_cross_entropy_forward_backward
    check_refused(
        (lambda: public(x, weight, targets[:2]), r"targets \(2,\) do not match x \(3, 4\)"),
        (lambda: public(x, weight[:, :3], targets), r"weight \(11, 3\) .* x \(3, 4\)"),
        (lambda: public(x, weight, targets.int()), "got torch.int32"),
        (lambda: public(x.half(), weight.half(), targets), "in float16"),
        (lambda: public(x, weight.bfloat16(), targets), "x torch.float32 on .*, weight torch.bfloat16 on"),
        (lambda: public(x.double(), weight.double(), targets), "got torch.float64"),
        (lambda: public(x, weight, targets.to("meta")), f"targets are on meta, x is on {DEVICE}"),
        (lambda: public(x, weight, targets, reduction="none"), "got 'none'"),
        (lambda: public(x, weight, targets, chunk=0), "got 0"),
        (lambda: wrong(x, weight, targets, grad_weight=weight[:, :3]), r"\(11, 4\) torch.float32, got \(11, 3\)"),
    )


class TestOnGpu:
    """Shapes that only a device is quick enough for, its memory, and that the host does not wait."""

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("n_words", [50_257, 151_936])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_vocabularies(self, dtype: torch.dtype, n_words: int) -> None:
        check_all(*make(700, n_words, 256, dtype), chunk=256, z_loss=1e-4)

    def test_beyond_two_to_the_31_logits(self) -> None:
        x, weight, targets = make(16_384, 151_936, 16, torch.bfloat16)
        got = Results(*linear_cross_entropy_forward_backward(x, weight, targets, chunk=16_384))
        last = slice(-100, None)
        scale = 100 / (targets != IGNORED).sum() * (targets[last] != IGNORED).float().mean()
        wanted = formula(x[last], weight, targets[last], dtype=torch.float64)
        eager = formula(x[last], weight, targets[last])
        assert error(got.lse[last], wanted.lse) <= 2 * error(eager.lse, wanted.lse) + 1e-5
        allowed = 2 * error(eager.dx, wanted.dx) * scale.item() + 2**-8 * wanted.dx.abs().max().item() * scale.item()
        assert error(got.dx[last], wanted.dx * scale) <= allowed

    @pytest.mark.parametrize("n_words", [151_936, 151_937])
    def test_peak_memory_is_one_chunk_of_logits(self, n_words: int) -> None:
        x, weight, targets = make(8192, n_words, 1024, torch.bfloat16)
        grad_weight = torch.zeros_like(weight)
        linear_cross_entropy_forward_backward(x[:64], weight, targets[:64], grad_weight=grad_weight)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy_forward_backward(x, weight, targets, grad_weight=grad_weight, chunk=2048)
        extra = torch.cuda.max_memory_allocated() - before
        logits, per_token = 2048 * (n_words + 15) * 2, 8192 * (2 * 4 + 8)
        assert extra <= logits + x.nbytes + per_token + 2**23
        del grad_weight
        torch.cuda.reset_peak_memory_stats()
        public(x.requires_grad_(), weight.requires_grad_(), targets.cpu(), chunk=2048)
        extra = torch.cuda.max_memory_allocated() - before
        assert extra <= logits + x.nbytes + per_token + 2**23 + 2048 * 1024 * 2, "and a chunk of x"

    @pytest.mark.parametrize("where", ["cuda", "cpu"])
    def test_the_host_does_not_wait(self, where: str) -> None:
        x, weight, targets = (t.requires_grad_(t.is_floating_point()) for t in make(512, 1000, 64, torch.bfloat16))
        targets = targets.to(where)
        public(x, weight, targets, chunk=128).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            (3.0 * public(x, weight, targets, chunk=128)).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows_of_targets_on_the_cpu(self, dtype: torch.dtype) -> None:
        """By the products that Qwen2.5 0.5B takes."""
        check_all(*make(700, 151_936, 896, dtype), from_host=True)
