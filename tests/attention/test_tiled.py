"""FlashAttention-2 in PyTorch against the oracle: values, every gradient, and the memory and work that it promises."""

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.attention import TiledFlashAttention, oracle_attention, tiled

NAMES = ("o", "lse", "dq", "dk", "dv")


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def inputs(
    n_queries: int, n_keys: int, *, batch: int = 1, kv_heads: int = 1, group: int = 1, d_head: int = 16
) -> list[Tensor]:
    """q, k, v and the gradient of o, in fp64."""
    return [
        randn(batch, heads, n, d_head, seed=seed)
        for seed, (heads, n) in enumerate(
            [(kv_heads * group, n_queries), (kv_heads, n_keys), (kv_heads, n_keys), (kv_heads * group, n_queries)]
        )
    ]


def saved_lse(o: Tensor) -> Tensor:
    """The one saved tensor of the shape of o without its last dimension."""
    (lse,) = (tensor for tensor in o.grad_fn.saved_tensors if tensor.shape == o.shape[:-1])
    return lse


def results_of_tiled(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float | None = None
) -> list[Tensor]:
    """o, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = TiledFlashAttention.apply(*leaves, causal, scale)
    return [o, saved_lse(o), *torch.autograd.grad(o, leaves, do)]


def results_of_reference(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float | None = None
) -> list[Tensor]:
    """o, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = oracle_attention(*leaves, causal=causal, scale=scale)
    return [o, lse, *torch.autograd.grad(o, leaves, do)]


def assert_all_equal_in_fp64(actual: list[Tensor], expected: list[Tensor], atol: float = 1e-10) -> None:
    """Equal but for rounding: up to 300 products of three values below 5, of 16 terms each: 6.7e-11 at 2^-53 each."""
    for name, ours, theirs in zip(NAMES, actual, expected, strict=True):
        assert ours.dtype == torch.float64, name
        assert not ours.isnan().any(), name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    n_queries=st.integers(1, 40),
    n_keys=st.integers(1, 40),
    d_head=st.sampled_from([1, 3, 16]),
    causal=st.booleans(),
    query_tile=st.sampled_from([1, 7, 16]),
    key_tile=st.sampled_from([1, 8, 11]),
    scale=st.sampled_from([None, 0.7]),
)
def test_small_tiles_of_any_shape_match_the_oracle(
    batch, kv_heads, group, n_queries, n_keys, d_head, causal, query_tile, key_tile, scale
):
    q, k, v, do = inputs(n_queries, n_keys, batch=batch, kv_heads=kv_heads, group=group, d_head=d_head)
    with mock.patch.multiple(tiled, QUERY_TILE=query_tile, KEY_TILE=key_tile):
        actual = results_of_tiled(q, k, v, do, causal, scale)
    assert_all_equal_in_fp64(actual, results_of_reference(q, k, v, do, causal, scale))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_within_the_budget_of_the_dtype(dtype, causal):
    """Against fp64 on the same rounded inputs, at most twice the error of the materialised attention in that dtype."""
    rounded = [x.to(dtype) for x in inputs(300, 257, batch=2, kv_heads=2, group=2, d_head=64)]
    oracle = results_of_reference(*(x.double() for x in rounded), causal)
    eager, ours = results_of_reference(*rounded, causal), results_of_tiled(*rounded, causal)
    for name, exact, theirs, actual in zip(NAMES, oracle, eager, ours, strict=True):
        assert actual.dtype == theirs.dtype
        seen = exact.isfinite()  # the lse of queries that see no key is -inf in all three
        assert torch.equal(actual.isfinite(), seen)
        norm = torch.linalg.vector_norm(exact[seen])
        budget, error = (torch.linalg.vector_norm((x.double() - exact)[seen]) / norm for x in (theirs, actual))
        print(f"{dtype} causal={causal} {name}: error {error:.2e}, eager {budget:.2e}")
        assert error <= 2 * budget + torch.finfo(theirs.dtype).eps


@pytest.mark.parametrize("shape", ["one head", "heads"])
def test_saves_one_tensor_of_the_shape_of_the_lse(shape):
    q, k, v, _ = inputs(8, 8, batch=4, kv_heads=8)  # every size but d_head equal to another
    if shape == "one head":
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
    o = TiledFlashAttention.apply(q.requires_grad_(), k, v)
    _, lse = oracle_attention(q, k, v, causal=False)
    torch.testing.assert_close(saved_lse(o), lse, rtol=0, atol=1e-10)
    assert len(o.grad_fn.saved_tensors) == 5


@pytest.mark.parametrize("causal", [False, True])
def test_one_head_needs_no_head_dimension(causal):
    one_head = [x[:, 0] for x in inputs(129, 140, batch=2)]
    assert_all_equal_in_fp64(results_of_tiled(*one_head, causal), results_of_reference(*one_head, causal))


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand(sign):
    q, k, v, do = inputs(140, 140, d_head=64)
    q, k = 100 * q, sign * 100 * k
    actual, expected = results_of_tiled(q, k, v, do, True), results_of_reference(q, k, v, do, True)
    assert expected[1].abs().max() > 1e4
    # A score of 4e4 is off by 64 2^-53 4e4 = 3e-10 at worst, which exp makes relative; q and k are 100 times larger.
    assert_all_equal_in_fp64(actual, expected, atol=100 * 3e-10)


def test_queries_that_see_no_key():
    q, k, v, do = inputs(300, 20, kv_heads=1, group=2)  # the first two tiles of queries see nothing, the third in part
    o, lse, dq, dk, dv = results_of_tiled(q, k, v, do, True)
    assert (o[:, :, :280] == 0).all()
    assert (lse[:, :, :280] == float("-inf")).all()
    assert (dq[:, :, :280] == 0).all()
    rest = results_of_reference(q[:, :, 280:], k, v, do[:, :, 280:], True)
    assert_all_equal_in_fp64([o[:, :, 280:], lse[:, :, 280:], dq[:, :, 280:], dk, dv], rest)


def test_strides_do_not_matter():
    contiguous = inputs(140, 150, batch=2, kv_heads=2, group=2)
    # as projections leave them, (batch, length, heads, d_head) transposed, and one with d_head outermost
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous]
    strided[1] = contiguous[1].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert not any(x.is_contiguous() for x in strided)
    assert_all_equal_in_fp64(results_of_tiled(*strided, True), results_of_tiled(*contiguous, True))


def test_second_derivatives_are_refused():
    q, k, v, _ = inputs(4, 4)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(TiledFlashAttention.apply(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


class Watch(TorchDispatchMode):
    """Counts matrix products and keeps the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products[func.overloadpacket.__name__] += 1
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_never_holds_all_scores(causal):
    q, k, v, do = inputs(512, 640)
    with Watch() as watch:
        results_of_tiled(q, k, v, do, causal)
    assert watch.largest == max(tiled.QUERY_TILE * tiled.KEY_TILE, k.numel()) < 512 * 640
    with Watch() as watch:
        results_of_reference(q, k, v, do, causal)
    assert watch.largest == 512 * 640  # so the watch sees what it is meant to see


@pytest.mark.parametrize(("causal", "tiles"), [(False, 4 * 5), (True, 2 + 3 + 4 + 5)])
def test_tiles_above_the_diagonal_are_skipped(causal, tiles):
    q, k, v, do = inputs(64, 80)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with mock.patch.multiple(tiled, QUERY_TILE=16, KEY_TILE=16):
        with Watch() as forward:
            o = TiledFlashAttention.apply(*leaves, causal)
        with Watch() as backward:
            o.backward(do)
    assert forward.products["bmm"] == 2 * tiles
    assert backward.products["bmm"] == 5 * tiles
    masked = 4 if causal else 0  # the tiles that the diagonal crosses
    assert forward.products["arange"] == backward.products["arange"] == 2 * masked


@pytest.mark.parametrize(
    ("needs", "products"),
    [((True, True, True), 5), ((True, False, False), 3), ((False, True, False), 3), ((False, False, True), 2)],
)
def test_inputs_without_gradients_cost_nothing(needs, products):
    q, k, v, do = inputs(20, 20)
    expected = results_of_reference(q, k, v, do, True)[2:]
    for x, need in zip((q, k, v), needs, strict=True):
        x.requires_grad_(need)
    o = TiledFlashAttention.apply(q, k, v, True)
    with Watch() as watch:
        o.backward(do)
    assert watch.products["bmm"] == products
    for x, need, gradient in zip((q, k, v), needs, expected, strict=True):
        assert (x.grad is not None) == need
        if need:
            torch.testing.assert_close(x.grad, gradient, rtol=0, atol=1e-10)


def test_without_gradients():
    q, k, v, _ = inputs(20, 30)
    assert TiledFlashAttention.apply(q, k, v).grad_fn is None
    o, lse = tiled.tiled_forward(q, k, v, causal=False)
    expected = oracle_attention(q, k, v, causal=False)
    torch.testing.assert_close((o, lse), expected, rtol=0, atol=1e-10)


def test_autocast_does_not_reach_inside():
    q, k, v, do = (x.float() for x in inputs(20, 20))
    plain = results_of_tiled(q, k, v, do, True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = results_of_tiled(q, k, v, do, True)
    for ours, theirs in zip(within, plain, strict=True):
        assert torch.equal(ours, theirs)
