"""The oracle against PyTorch's attention in fp64, against formulas written out, and at its edges."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs336_systems.attention import oracle_attention
from tests.model.test_ops import randn


def visible(n_queries: int, n_keys: int) -> Tensor:
    """True where a causal query sees a key, the last query seeing every key: the rule, cell by cell."""
    return torch.tensor([[j <= i + n_keys - n_queries for j in range(n_keys)] for i in range(n_queries)])


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """PyTorch's attention with the mask and the key/value head of each query head given explicitly."""
    served_by = [head * k.shape[1] // q.shape[1] for head in range(q.shape[1])]
    mask = visible(q.shape[2], k.shape[2]) if causal else None
    return F.scaled_dot_product_attention(q, k[:, served_by], v[:, served_by], attn_mask=mask, scale=scale)


def assert_equal_in_fp64(actual: Tensor, expected: Tensor) -> None:
    """Equal but for rounding: below 20 terms of 16 products of three values below 5: 20 16 125 2^-53 = 4.4e-12."""
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-12)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    n_queries=st.integers(1, 9),
    extra_keys=st.integers(0, 5),
    d_head=st.sampled_from([1, 2, 5, 16]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_output_and_gradients_match_sdpa(batch, kv_heads, group, n_queries, extra_keys, d_head, causal, scale):
    q = randn(batch, kv_heads * group, n_queries, d_head, seed=1).requires_grad_()
    k = randn(batch, kv_heads, n_queries + extra_keys, d_head, seed=2).requires_grad_()
    v = randn(batch, kv_heads, n_queries + extra_keys, d_head, seed=3).requires_grad_()
    upstream = randn(batch, kv_heads * group, n_queries, d_head, seed=4)
    actual, _ = oracle_attention(q, k, v, causal=causal, scale=scale)
    expected = sdpa(q, k, v, causal=causal, scale=scale)
    assert_equal_in_fp64(actual, expected)
    for ours, theirs in zip(*(torch.autograd.grad(o, (q, k, v), upstream) for o in (actual, expected)), strict=True):
        assert_equal_in_fp64(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_lse_is_the_natural_logarithm_of_the_softmax_denominator(causal):
    q, k, v = randn(2, 4, 5, 8, seed=1), randn(2, 2, 7, 8, seed=2), randn(2, 2, 7, 8, seed=3)
    _, lse = oracle_attention(q, k, v, causal=causal)
    weights = torch.exp(torch.einsum("bhqd,bhkd->bhqk", q, k[:, [0, 0, 1, 1]]) / 8**0.5)
    if causal:
        weights = weights * visible(5, 7)
    assert lse.shape == (2, 4, 5)
    assert_equal_in_fp64(lse, weights.sum(dim=-1).log())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_queries_that_see_no_key_are_zero_and_pass_nothing_back(dtype):
    q, k, v = (randn(1, 2, n, 8, dtype=dtype, seed=n).requires_grad_() for n in (7, 3, 3))
    with torch.autograd.detect_anomaly(check_nan=True):
        o, lse = oracle_attention(q, k, v, causal=True)
        gradients = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))
    assert torch.equal(o[:, :, :4], torch.zeros(1, 2, 4, 8, dtype=dtype))
    assert (lse[:, :, :4] == float("-inf")).all()
    assert lse[:, :, 4:].isfinite().all()
    assert (gradients[0][:, :, :4] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    # What the other queries give and receive is as if the blind ones were not there.
    o_rest, lse_rest = oracle_attention(q[:, :, 4:], k, v, causal=True)
    rest = torch.autograd.grad((o_rest, lse_rest), (q, k, v), (torch.ones_like(o_rest), torch.ones_like(lse_rest)))
    tolerance = 8 * torch.finfo(dtype).eps
    for ours, theirs in zip((o[:, :, 4:], lse[:, :, 4:], *gradients), (o_rest, lse_rest, *rest), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
