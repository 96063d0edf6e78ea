"""Documents in one sequence: each attends as if it were alone, forward and backward, whatever tiles they meet."""

import pytest
import torch

from cs336_systems.attention.dispatch import attention, unsupported_reason
from cs336_systems.attention.flash.function import FlashKernels
from cs336_systems.attention.flash.tiles import Tile
from cs336_systems.attention.oracle import oracle_attention
from cs336_systems.blocks.ops import block_ops

LENGTHS = ([1, 37, 32, 3, 64, 13], [150], [66, 1, 1, 82])
"""Documents of each sequence: of one token, longer than tiles, across their borders, and a sequence of one."""


def starts_of(lengths):
    firsts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return firsts.repeat_interleave(torch.tensor(lengths)).int()


STARTS = torch.stack([starts_of(lengths) for lengths in LENGTHS])


def inputs(dtype, device="cpu"):
    torch.manual_seed(1)
    shapes = ((3, 2, 150, 16), (3, 1, 150, 16), (3, 1, 150, 16))
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def alone(q, k, v):
    """The oracle's output of each document by itself."""
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts = zip(*(x[row : row + 1].split(lengths, dim=2) for x in (q, k, v)), strict=True)
        rows.append(torch.cat([oracle_attention(*part, causal=True)[0] for part in parts], dim=2))
    return torch.cat(rows)


def results(o, leaves):
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(o)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def assert_alike(got, leaves):
    for ours, exact in zip(got, results(alone(*leaves), leaves), strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


def test_oracle_and_reference_treat_each_document_as_if_alone():
    leaves = inputs(torch.float64)
    assert_alike(results(oracle_attention(*leaves, causal=True, starts=STARTS)[0], leaves), leaves)
    assert_alike(results(attention(*leaves, causal=True, impl="reference", starts=STARTS), leaves), leaves)


def of_block(ops, leaves, starts):
    """Output and gradients by the two functions that a block calls."""
    q, k, v = (x.detach() for x in leaves)
    o, lse = ops.attention_forward(q, k, v, starts=starts)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(o)
    into = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    ops.attention_backward(do, q, k, v, o, lse, into, starts=starts)
    return [o, *into]


def test_a_blocks_reference_treats_each_document_as_if_alone():
    leaves = inputs(torch.float64)
    assert_alike(of_block(block_ops("reference", "reference"), leaves, STARTS), leaves)


def small_tiles_of_flash(monkeypatch):
    monkeypatch.setattr("cs336_systems.attention.flash.forward.tile_for", lambda *key: Tile(32, 16, 4, 1))
    monkeypatch.setattr("cs336_systems.attention.flash.backward.tile_for", lambda *key: Tile(16, 32, 4, 1))


@pytest.mark.parametrize("first", [1, 70, 149])
@pytest.mark.parametrize("name", ["reference", "flash"])
def test_the_last_queries_alone_see_what_they_see_among_all(first, name, ieee_products, monkeypatch):
    """Documents end before the first query, hold it, or begin after it; keys that no query sees have no gradients."""
    device = "cuda" if torch.cuda.is_available() and name == "flash" else "cpu"
    small_tiles_of_flash(monkeypatch)
    q, k, v = (x.detach() for x in inputs(torch.float32, device))
    own, starts = slice(first, None), STARTS.to(device)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    o = alone(*exact)[:, :, own]
    expected = results(o, exact)
    expected[1] = expected[1][:, :, own]
    found = of_block(block_ops("reference", name), (q[:, :, own], k, v), starts[:, own].contiguous())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=1e-5)
    again, _ = oracle_attention(q[:, :, own], k, v, causal=True, starts=starts[:, own].contiguous())
    torch.testing.assert_close(again, expected[0].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("small_tiles", [False, True])
def test_flash_treats_each_document_as_if_alone(small_tiles, ieee_products, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton interprets
    if small_tiles:
        small_tiles_of_flash(monkeypatch)
    leaves = inputs(torch.float32, device)
    starts = STARTS.to(device)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = results(alone(*exact), exact)
    for got in (
        results(FlashKernels.apply(*leaves, True, None, starts), leaves),
        of_block(block_ops("reference", "flash"), leaves, starts),
    ):
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=1e-5)


def test_what_cannot_be_packed_is_refused():
    q, k, v = inputs(torch.float32)
    reason = unsupported_reason("sdpa-flash", q, k, v, causal=True, starts=STARTS)
    assert reason == "it cannot mask documents from each other, as reference, flash and hopper can"
    with pytest.raises(ValueError, match=r"contiguous int32 \(3, 150\), got torch.int64 \(3, 150\)"):
        attention(q, k, v, causal=True, impl="reference", starts=STARTS.long())
    with pytest.raises(ValueError, match="got causal False, 150 queries, 150 keys"):
        attention(q, k, v, causal=False, impl="reference", starts=STARTS)
    with pytest.raises(ValueError, match="no more queries than keys, got causal True, 150 queries, 149 keys"):
        attention(q, k[:, :, 1:], v[:, :, 1:], causal=True, impl="reference", starts=STARTS)
