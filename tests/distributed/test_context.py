"""Context parallelism against one process: attention and its gradients at a rank's tokens, what is sent, refusals."""

import pytest
import torch

from cs336_systems.blocks import REFERENCE
from cs336_systems.distributed.context import ORDERS, context_ops, meeting, positions
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic

from .checks import checks_of, on_each

LENGTH, D_HEAD = 24, 8


def attend(ops, tensors, do):
    """(o, lse, dq, dk, dv), gradients written into slices of one of q | k | v."""
    q, k, v = tensors
    o, lse = ops.attention_forward(q, k, v)
    dqkv = torch.empty(q.shape[0], q.shape[2], sum(x.shape[1] for x in tensors), D_HEAD, dtype=q.dtype)
    gradients = dqkv.transpose(1, 2).split_with_sizes([x.shape[1] for x in tensors], dim=1)
    ops.attention_backward(do, q, k, v, o, lse, gradients)
    return o, lse, *gradients


def draw(n_heads, n_kv_heads, dtype):
    generator = torch.Generator().manual_seed(n_kv_heads)
    heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    return [torch.randn(2, n, LENGTH, D_HEAD, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def check_attention_is_that_of_whole_sequences(rank: Rank):
    """In fp64 to its rounding; in fp32 within as much as twice the error of the whole in fp32, and a rounding."""
    group = Mesh.over(rank, context=rank.world_size).group("context")
    for order in ORDERS:
        own, ops = positions(LENGTH, rank.rank, rank.world_size, order), context_ops(REFERENCE, group, order)
        for n_heads, n_kv_heads in ((4, 4), (8, 2), (3, 1)):
            *exact, do = draw(n_heads, n_kv_heads, torch.float64)
            expected = attend(REFERENCE, exact, do)
            found = attend(ops, [x[:, :, own] for x in exact], do[:, :, own])
            torch.testing.assert_close(found, tuple(x[:, :, own] for x in expected), rtol=1e-11, atol=1e-12)
            *narrow, do = draw(n_heads, n_kv_heads, torch.float32)
            whole = attend(REFERENCE, narrow, do)
            found = attend(ops, [x[:, :, own] for x in narrow], do[:, :, own])
            for part, one, right in zip(found, whole, expected, strict=True):
                budget = 2 * (one - right).abs().max() + 2**-23 * right.abs().max()
                assert (part - right[:, :, own]).abs().max() <= budget, (order, n_kv_heads)


test_on_two_ranks = on_each(2, checks_of(globals()))
test_on_four_ranks = on_each(4, checks_of(globals()))


def check_each_key_is_sent_once_and_its_gradient_returns(rank: Rank):
    """Zigzag sends half or all of a rank's keys, ring all to later ranks; gathered reduces gradients of all."""
    group, n = Mesh.over(rank, context=rank.world_size).group("context"), rank.world_size
    local = LENGTH // n
    for order in ORDERS:
        *tensors, do = (x[:, :, positions(LENGTH, rank.rank, n, order)] for x in draw(8, 2, torch.float32))
        with Traffic() as log:
            attend(context_ops(REFERENCE, group, order), tensors, do)
        sent = sum(event.n_bytes for event in log.sent if event.kind == "send")
        gathered = [(event.kind, event.n_bytes) for event in log.sent if event.kind not in ("send", "recv")]
        n_bytes = 2 * 2 * 2 * local * D_HEAD * 4  # keys and values of two sequences and two heads
        if order == "gathered":
            assert (sent, gathered) == (0, [("_allgather_base", n * n_bytes)] * 2 + [("_reduce_scatter_base", n_bytes)])
            continue
        others = [other for other in range(n) if other != rank.rank]
        met = [(meeting(a, b, local, order)) for other in others for a, b in ((other, rank.rank), (rank.rank, other))]
        there, back = ([each for each in met[i::2] if each] for i in range(2))
        shares = [sum((each.keys.stop - each.keys.start) / local for each in part) for part in (there, back)]
        if order == "ring":
            assert shares == [n - 1 - rank.rank, rank.rank]
        assert (sent, gathered) == ((2 * shares[0] + shares[1]) * n_bytes, [])


test_bytes_of_four_ranks = on_each(4, (check_each_key_is_sent_once_and_its_gradient_returns,))


@pytest.mark.parametrize(("order", "n_parts"), [("ring", 3), ("zigzag", 6), ("gathered", 6)])
def test_parts_must_be_equal(order, n_parts):
    with pytest.raises(ValueError, match=f"{n_parts} equal parts, got 16 tokens"):
        positions(16, 0, 3, order)
    every = torch.cat([positions(24, rank, 3, order) for rank in range(3)])
    assert torch.equal(every.sort().values, torch.arange(24))
