"""Every implementation that runs here against the oracle, and the reasons of those that do not."""

import pytest
import torch

from cs336_systems.attention.dispatch import attention, attention_op, unsupported_reason
from cs336_systems.attention.oracle import oracle_attention

ON_A_CPU = ("reference", "tiled", "sdpa-flash")
NEED_CUDA = ("flash", "hopper", "sdpa-cudnn", "sdpa-efficient", "flex")


def inputs(*, kv_heads=4, n_queries=33, n_keys=33, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((2, 4, n_queries, 16), (2, kv_heads, n_keys, 16), (2, kv_heads, n_keys, 16))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("impl", ON_A_CPU)
@pytest.mark.parametrize(("causal", "kv_heads", "scale"), [(False, 4, 0.3), (True, 2, None)])
def test_outputs_and_gradients_are_the_oracles(impl, causal, kv_heads, scale):
    leaves = inputs(kv_heads=kv_heads)
    do = torch.randn_like(leaves[0])
    wanted, _ = oracle_attention(*leaves, causal=causal, scale=scale)
    got = attention(*leaves, causal=causal, impl=impl, scale=scale)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(got, leaves, do), torch.autograd.grad(wanted, leaves, do), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("impl", ON_A_CPU)
def test_an_empty_batch(impl):
    leaves = [x.detach()[:0].requires_grad_() for x in inputs()]
    o = attention(*leaves, causal=True, impl=impl)
    assert o.shape == (0, 4, 33, 16)
    assert [x.shape for x in torch.autograd.grad(o, leaves, o)] == [x.shape for x in leaves]


@pytest.mark.parametrize("impl", NEED_CUDA)
def test_what_needs_a_gpu_says_so_and_does_not_fall_back(impl):
    leaves = inputs(dtype=torch.float32)
    reason = unsupported_reason(impl, *leaves, causal=True)
    assert reason is not None
    assert "CUDA" in reason
    assert "cpu" in reason
    with pytest.raises(ValueError, match=f"{impl!r} cannot serve this request: .*CUDA"):
        attention(*leaves, causal=True, impl=impl)


def test_other_alignments_of_the_mask_are_refused():
    fewer_queries, fewer_keys = inputs(n_queries=20), inputs(n_keys=20)
    assert "aligns a causal mask to the first key" in (
        unsupported_reason("sdpa-flash", *fewer_queries, causal=True) or ""
    )
    assert unsupported_reason("sdpa-flash", *fewer_queries, causal=False) is None
    assert "see no key" in (unsupported_reason("reference", *fewer_keys, causal=True) or "")
    assert unsupported_reason("tiled", *fewer_keys, causal=True) is None


def test_heads_that_are_not_contiguous_are_refused_where_torch_takes_none():
    q, k, v = inputs()
    there = q.detach().mT.contiguous().mT
    assert "stride 1, got [33, 1, 1]" in (unsupported_reason("sdpa-flash", there, k, v, causal=True) or "")


def test_unknown_names_list_the_known_ones():
    for call in (lambda: attention(*inputs(), causal=True, impl="falsh"), lambda: attention_op("falsh")):
        with pytest.raises(ValueError, match=r"'falsh': did you mean 'flash'\? known are reference, .*flex"):
            call()
