"""FlashAttention-2 in PyTorch against the oracle: values, every gradient, and the memory and work that it promises."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs336_systems.attention import TiledFlashAttention, tiled
from tests.attention.error_budget import Results, check, eager, make, results_of, strided
from tests.modes import Largest

tiled_results = partial(results_of, TiledFlashAttention)
results_of_reference = partial(eager, scale=None, dtype=torch.float64)


def inputs(n_queries: int, n_keys: int, *, kv_heads: int = 1, group: int = 1, **sizes: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of o, in fp64."""
    heads = {"heads": kv_heads * group, "kv_heads": kv_heads}
    return make("cpu", torch.float64, n_queries=n_queries, n_keys=n_keys, **heads, **sizes)


def assert_all_equal_in_fp64(actual: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-10) -> None:
    """Equal but for rounding: up to 300 products of three values below 5, of 16 terms each: 6.7e-11 at 2^-53 each."""
    for name, ours, theirs in zip(Results._fields, actual, expected, strict=True):
        assert ours.dtype == torch.float64, name
        assert not ours.isnan().any(), name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@settings(max_examples=12, deadline=None, database=None, derandomize=True)
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
        actual = tiled_results(q, k, v, do, causal, scale)
    assert_all_equal_in_fp64(actual, results_of_reference(q, k, v, do, causal, scale=scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_err_no_more_than_eager_code(dtype):
    tensors = make("cpu", dtype, batch=2, heads=4, kv_heads=2, n_queries=140, n_keys=129, d_head=64)
    check(*tensors, True, attend=TiledFlashAttention)


def test_other_layouts_autocast_and_one_head_change_nothing():
    tensors = [x.float() for x in inputs(20, 20, batch=3)]
    expected = tiled_results(*tensors, True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tiled_results(*(strided(x)[i] for i, x in enumerate(tensors)), True)
        one_head = tiled_results(*(x[:, 0] for x in tensors), True)
    for ours, flat, wanted in zip(found, one_head, expected, strict=True):
        torch.testing.assert_close(ours, wanted)
        torch.testing.assert_close(flat, wanted[:, 0])


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand(sign):
    q, k, v, do = inputs(140, 140, d_head=64)
    q, k = 100 * q, sign * 100 * k
    actual, expected = tiled_results(q, k, v, do, True), results_of_reference(q, k, v, do, True)
    assert expected[1].abs().max() > 1e4
    # A score of 4e4 is off by 64 2^-53 4e4 = 3e-10 at worst, which exp makes relative; q and k are 100 times larger.
    assert_all_equal_in_fp64(actual, expected, atol=100 * 3e-10)


def test_queries_that_see_no_key():
    q, k, v, do = inputs(300, 20, kv_heads=1, group=2)  # the first two tiles of queries see nothing, the third in part
    o, lse, dq, dk, dv = tiled_results(q, k, v, do, True)
    assert (o[:, :, :280] == 0).all()
    assert (lse[:, :, :280] == float("-inf")).all()
    assert (dq[:, :, :280] == 0).all()
    rest = results_of_reference(q[:, :, 280:], k, v, do[:, :, 280:], True)
    assert_all_equal_in_fp64([o[:, :, 280:], lse[:, :, 280:], dq[:, :, 280:], dk, dv], rest)


def test_a_second_derivative_raises():
    q, k, v, do = (each.requires_grad_() for each in inputs(20, 20))
    (dq,) = torch.autograd.grad(TiledFlashAttention.apply(q, k, v, True), q, do, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


class Watch(Largest):
    """Counts operators besides."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products[func.overloadpacket.__name__] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("causal", [False, True])
def test_never_holds_all_scores(causal):
    q, k, v, do = inputs(512, 640)
    with Watch() as watch:
        tiled_results(q, k, v, do, causal)
    assert watch.n_elements == max(tiled.QUERY_TILE * tiled.KEY_TILE, k.numel()) < 512 * 640
    with Watch() as watch:
        results_of_reference(q, k, v, do, causal)
    assert watch.n_elements == 512 * 640  # so the watch sees what it is meant to see


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
