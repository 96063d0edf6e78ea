"""Context parallelism against one process: attention and its gradients at a rank's tokens, what is sent, refusals."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from cs336_systems.blocks import REFERENCE, BlockGradients, BlockWeights, Saved, backward, forward
from cs336_systems.blocks.ops import block_ops
from cs336_systems.costs.kept import LEVELS, kept_names
from cs336_systems.costs.parallelism.step import GATHER, SCATTER, SEND, context_sent
from cs336_systems.distributed.context import context_ops, positions
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic
from cs336_systems.ranks import CONTEXT_ORDERS

from ..attention.test_packed import starts_of
from ..blocks.cases import LLAMA, QWEN3, block_of, inputs, tables, written_out
from ..kernels.interpreter import interpret_without_gpu
from .checks import checks_of, on_each, on_gpus, on_ranks, spawn

LENGTH, D_HEAD = 24, 8


def attend(ops, tensors, do, **documents):
    """(o, lse, dq, dk, dv), gradients written into slices of one of q | k | v."""
    q, k, v = tensors
    o, lse = ops.attention_forward(q, k, v, **documents)
    dqkv = q.new_empty(q.shape[0], q.shape[2], sum(x.shape[1] for x in tensors), q.shape[3])
    gradients = dqkv.transpose(1, 2).split_with_sizes([x.shape[1] for x in tensors], dim=1)
    ops.attention_backward(do, q, k, v, o, lse, gradients, **documents)
    return o, lse, *gradients


def draw(n_heads, n_kv_heads, length, d_head, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n_kv_heads)
    heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    shapes = [(2, n, length, d_head) for n in heads]
    return [torch.randn(s, generator=generator, dtype=torch.float64, device="cpu").to(dtype) for s in shapes]


def assert_as_whole(found, whole, exact, own, rounding, what):
    """Off from the exact results at these tokens by at most twice what those of the whole are, and a rounding."""
    for number, (part, one, right) in enumerate(zip(found, whole, exact, strict=True)):
        budget = 2 * (one - right).abs().max() + rounding * right.abs().max()
        off = (part - right[:, :, own]).abs().max()
        assert off <= budget, (*what, number, off, budget)


def check_attention_is_that_of_whole_sequences(rank: Rank):
    """In fp64 to its rounding; in fp32 within as much as twice the error of the whole in fp32, and a rounding."""
    group = Mesh.over(rank, context=rank.world_size).group("context")
    for order in CONTEXT_ORDERS:
        own, ops = positions(LENGTH, rank.rank, rank.world_size, order), context_ops(REFERENCE, group, order)
        for n_heads, n_kv_heads in ((4, 4), (8, 2), (3, 1)):
            *exact, do = draw(n_heads, n_kv_heads, LENGTH, D_HEAD)
            expected = attend(REFERENCE, exact, do)
            found = attend(ops, [x[:, :, own] for x in exact], do[:, :, own])
            torch.testing.assert_close(found, tuple(x[:, :, own] for x in expected), rtol=1e-11, atol=1e-12)
            *narrow, do = draw(n_heads, n_kv_heads, LENGTH, D_HEAD, torch.float32)
            whole = attend(REFERENCE, narrow, do)
            found = attend(ops, [x[:, :, own] for x in narrow], do[:, :, own])
            assert_as_whole(found, whole, expected, own, 2**-23, (order, n_kv_heads))


def check_documents_are_masked_from_each_other(rank: Rank):
    """Documents within a rank's part, over the borders of parts and of ranks, and of one token."""
    group = Mesh.over(rank, context=rank.world_size).group("context")
    packed = ([[LENGTH], [1] * LENGTH], [[2, 1, 8, 13], [7, 10, 7]], [[23, 1], [12, 12]])
    for order, lengths in itertools.product(CONTEXT_ORDERS, packed):
        own, ops = positions(LENGTH, rank.rank, rank.world_size, order), context_ops(REFERENCE, group, order)
        starts = torch.stack([starts_of(one) for one in lengths])
        for n_heads, n_kv_heads in ((4, 4), (3, 1)):
            *exact, do = draw(n_heads, n_kv_heads, LENGTH, D_HEAD)
            expected = attend(REFERENCE, exact, do, starts=starts)
            found = attend(ops, [x[:, :, own] for x in exact], do[:, :, own], starts=starts[:, own].contiguous())
            torch.testing.assert_close(found, tuple(x[:, :, own] for x in expected), rtol=1e-11, atol=1e-12)


def attend_by_triton(rank: Rank):
    interpret_without_gpu()
    group, n = Mesh.over(rank, context=rank.world_size).group("context"), rank.world_size
    starts = torch.stack([starts_of(one) for one in ([2, 1, 8, 13], [7, 10, 7])])
    *narrow, do = draw(2, 1, LENGTH, 16, torch.float32)
    expected = attend(REFERENCE, [x.double() for x in narrow], do.double(), starts=starts)
    whole = attend(REFERENCE, narrow, do, starts=starts)
    for order in CONTEXT_ORDERS:
        own, ops = positions(LENGTH, rank.rank, n, order), context_ops(block_ops("reference", "flash"), group, order)
        found = attend(ops, [x[:, :, own] for x in narrow], do[:, :, own], starts=starts[:, own].contiguous())
        assert_as_whole(found, whole, expected, own, 2**-22, (order,))


def check_a_block_is_the_whole_blocks_rows_whatever_it_keeps(rank: Rank):
    """With gradients that add up to the whole block's, the same bits at every level, and the bytes predicted."""
    group, n = Mesh.over(rank, context=rank.world_size).group("context"), rank.world_size
    names = {"_allgather_base": GATHER, "_reduce_scatter_base": SCATTER, "send": SEND}
    for config, order in itertools.product((LLAMA, QWEN3), CONTEXT_ORDERS):
        own, ops = positions(LENGTH, rank.rank, n, order), context_ops(REFERENCE, group, order)
        whole, _ = written_out(config, LENGTH, torch.float64, "all")
        parameters = dict(block_of(config, torch.float64).named_parameters())
        x, dy = (each[:, own] for each in inputs(config, LENGTH, torch.float64))
        how = ops, config, *(each[own] for each in tables(config, LENGTH, torch.float64))
        found = []
        for keep in LEVELS:
            weights, saved = BlockWeights.of(parameters), Saved(kept_names(keep))
            grads = BlockGradients.empty(parameters, parameters)
            with Traffic() as log:
                y = forward(x, weights, saved, *how)
                dx = backward(dy, weights, saved, grads, *how)
            found.append((y, dx, *grads.by_parameter(parameters).values()))
            sent = Counter({SEND: 0, GATHER: 0, SCATTER: 0})
            for event in log.sent:
                if event.kind != "recv":
                    sent[names[event.kind]] += event.n_bytes
            asked = replace(config, n_layers=1), 2 * LENGTH // n, keep, n, 8
            assert +sent == +context_sent(*asked, rank=rank.rank, order=order), (order, keep)
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        torch.testing.assert_close(found[0][:2], (whole["y"][:, own], whole["dx"][:, own]), rtol=1e-10, atol=1e-11)
        for name, gradient in grads.by_parameter(parameters).items():
            total = gradient.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, whole[name], rtol=1e-9, atol=1e-10)


def attend_on_gpu(rank: Rank, attention):
    group = Mesh.over(rank, context=rank.world_size).group("context")
    for d_head, length, order in itertools.product((64, 128), (512, 1536), CONTEXT_ORDERS):
        ops = block_ops("reference", attention)
        own = positions(length, rank.rank, rank.world_size, order).to(rank.device)
        for n_heads, n_kv_heads in ((4, 4), (8, 2)):
            *narrow, do = (x.to(rank.device) for x in draw(n_heads, n_kv_heads, length, d_head, torch.bfloat16))
            starts = torch.stack([starts_of(one) for one in ([length], [100, 37, length // 2, length // 2 - 137])])
            packed = starts.to(rank.device), starts[:, own.cpu()].to(rank.device).contiguous()
            for documents, own_documents in (({}, {}), ({"starts": each} for each in packed)):
                expected = attend(REFERENCE, [x.double() for x in narrow], do.double(), **documents)
                whole = attend(ops, narrow, do, **documents)
                local = [x[:, :, own] for x in narrow]
                found = attend(context_ops(ops, group, order), local, do[:, :, own], **own_documents)
                what = attention, order, length, d_head, n_kv_heads, documents
                assert_as_whole(found, whole, expected, own, 2**-8, what)  # gathered adds in bf16


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
@pytest.mark.parametrize("attention", ["flash", "hopper"])
def test_attention_over_gpus_is_that_of_whole_sequences(world_size, device, attention):
    """In bf16, within twice the error of the same kernels on whole sequences, and a rounding."""
    spawn(attend_on_gpu, world_size, attention, device=device)


def test_a_kernels_attention_masks_documents_too():
    on_ranks(attend_by_triton, 2)


test_on_two_ranks = on_each(2, checks_of(globals()))
test_on_four_ranks = on_each(4, checks_of(globals()))


@pytest.mark.parametrize(("order", "n_parts"), [("ring", 3), ("zigzag", 6), ("gathered", 6)])
def test_parts_must_be_equal(order, n_parts):
    with pytest.raises(ValueError, match=f"{n_parts} equal parts, got 16 tokens"):
        positions(16, 0, 3, order)
    every = torch.cat([positions(24, rank, 3, order) for rank in range(3)])
    assert torch.equal(every.sort().values, torch.arange(24))
