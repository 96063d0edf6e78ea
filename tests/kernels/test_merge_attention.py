"""Outputs of attention over two sets of keys, merged: against fp64, any strides, and what must be refused."""

import pytest
import torch

from cs336_systems.blocks.ops import attention_forward, attention_merge_
from cs336_systems.kernels.merge_attention import merge_attention_
from tests.kernels.against_fp64 import WITH_BF16, check, check_refused, random

FAR = 40.0
"""Scores of one set of keys are so much higher for some queries that the other does not count there."""


def make(shape, device, dtype):
    """(o, lse, part of o, its lse): heads next to each other in memory, and half of the queries of a longer output."""
    n_batch, n_heads, n_queries, d_head = shape
    o, part_o = (
        random((n_batch, 2 * n_queries, n_heads, d_head), device, dtype, seed).transpose(1, 2) for seed in (0, 1)
    )
    lse, part_lse = (random((n_batch, n_heads, 2 * n_queries), device, torch.float32, seed) for seed in (2, 3))
    lse[..., ::3] += FAR
    part_lse[..., 1::3] += FAR
    half = slice(n_queries, None)
    return o[:, :, half], lse[..., half], part_o[:, :, :n_queries], part_lse[..., half].contiguous()


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 4, 70, 64), (1, 2, 9, 24), (2, 1, 3, 128), (1, 2, 0, 8)], ids=str)
@pytest.mark.parametrize(("device", "dtype"), WITH_BF16)
def test_values(shape, device, dtype):
    given = make(shape, device, dtype)
    found, eager, exact = ([x.clone() for x in given] for _ in range(3))
    exact = [x.double() for x in exact]
    merge_attention_(*found)
    attention_merge_(*eager)
    attention_merge_(*exact)
    for name, *of in zip(("o", "lse"), found, eager, exact, strict=False):
        check(name, *of)
    assert all(torch.equal(left, was) for left, was in zip(found[2:], given[2:], strict=True))


def test_in_place_among_other_queries():
    o, lse, *part = make((1, 2, 4, 8), "cpu", torch.float64)
    whole_o, whole_lse = o._base.clone(), lse._base.clone()
    attention_merge_(o, lse, *part)
    assert torch.equal(o._base[:, :4], whole_o[:, :4]) and not torch.equal(o._base, whole_o)
    assert torch.equal(lse._base[..., :4], whole_lse[..., :4])


def test_attention_over_halves_of_keys_is_attention_over_all():
    q, k, v = (random((2, 4, 6, 8), "cpu", torch.float64, seed) for seed in range(3))
    o, lse = attention_forward(q, k[:, :, :2], v[:, :, :2], causal=False)
    attention_merge_(o, lse, *attention_forward(q, k[:, :, 2:], v[:, :, 2:], causal=False))
    torch.testing.assert_close((o, lse), attention_forward(q, k, v, causal=False), rtol=1e-12, atol=1e-12)


def test_refusals():
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    o, lse = torch.zeros(1, 2, 3, 8, device=device), torch.zeros(1, 2, 3, device=device)
    apart = torch.zeros(1, 2, 8, 3, device=device).mT
    check_refused(
        (lambda: merge_attention_(o, lse, o[:, :, :2], lse), r"an output \(1, 2, 3, 8\) is not merged"),
        (lambda: merge_attention_(o, lse.double(), o, lse), "lse must be torch.float32, got torch.float64"),
        (lambda: merge_attention_(o, lse, o.double(), lse), "got torch.float64"),
        (lambda: merge_attention_(o, lse, apart, lse), rf"contiguous on {device}, got strides \(48, 24, 1, 3\)"),
    )
