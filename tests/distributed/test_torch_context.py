"""Torch's context parallelism computes what one process computes, of zigzag's tokens, so that it is a fair peer.

Torch has it for CUDA alone. On a CPU its flash kernels are stood in for by their formula, so that all but these is
torch's own: which tokens, which keys, what is sent, and how results are merged.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode
from torch.library import _scoped_library

from cs336_systems.attention.dispatch import attention_op
from cs336_systems.distributed.context import positions
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.torch_context import sharing_by_torch
from cs336_systems.ranks import TORCH_CONTEXT_ATTENTIONS, TORCH_CONTEXT_ORDERS

from .checks import checks_of, on_each, on_gpus, spawn
from .test_context import assert_as_whole, draw

HEADS = (4, 4), (8, 2)
FLASH = "_scaled_dot_product_flash_attention"


def attend(attention, tensors, do):
    """(o, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = attention_op(attention)(*leaves, causal=True)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def softmax(q, k, causal, scale):
    """Probabilities (B, H, S, T) and their log-sum-exp, fp32."""
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    p, lse = softmax(q, k, is_causal, scale or q.shape[-1] ** -0.5)
    seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return p @ v, lse, None, None, q.shape[2], k.shape[2], *seeds, q.new_empty(0)


def flash_backward(do, q, k, v, o, lse, _0, _1, _2, _3, _4, is_causal, *_, scale=None):
    """By the log-sum-exp and output of all keys, though these are some of them."""
    scale, shared = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    p, own_lse = softmax(q, k, is_causal, scale)
    p = p * torch.exp(own_lse - lse)[..., None]
    ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * scale
    dk, dv = (x.transpose(-1, -2) @ y for x, y in ((ds, q), (p, do)))
    return ds @ k, *(x.unflatten(1, (-1, shared)).sum(2) for x in (dk, dv))


def scaled_dot_product_attention(q, k, v, *, is_causal, scale, enable_gqa):
    return getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, is_causal, scale=scale)[0]


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Let a CPU compute what torch shares, which is only the operators of CUDA's kernels."""
    with (
        _scoped_library("aten", "IMPL") as library,
        patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention),
    ):
        library.impl(FLASH, flash, "CPU")
        library.impl(f"{FLASH}_backward", flash_backward, "CPU")
        yield


def sent_by_torch(log: CommDebugMode) -> dict[str, int]:
    """The numbers of its collectives by name, without those that c10d's own functions start."""
    counts = {str(kind): count for kind, count in log.get_comm_counts().items()}
    return {name.split(".")[-1]: count for name, count in counts.items() if "c10d_functional" in name and count}


def compare_with_whole(rank: Rank, attention, length, d_head, dtype, rounding):
    """Within twice the error of the same attention of whole sequences, and a rounding; both orders."""
    ranks = Mesh.over(rank, context=rank.world_size).devices["context"]
    for order, heads in itertools.product(TORCH_CONTEXT_ORDERS, HEADS):
        *narrow, do = (x.to(rank.device) for x in draw(*heads, length, d_head, dtype))
        expected = attend("reference", [x.double() for x in narrow], do.double())
        whole = attend(attention, narrow, do)
        with sharing_by_torch(ranks, length, order) as own:
            found = attend(attention, [x[:, :, own] for x in narrow], do[:, :, own])
        assert_as_whole(found, whole, expected, own, rounding, (attention, order, length, d_head, heads))


def check_ranks_attend_to_whole_sequences(rank: Rank):
    with kernels_on_cpu():
        compare_with_whole(rank, "sdpa-flash", 24, 8, torch.float32, 2**-23)


def check_tokens_are_those_of_zigzag_and_keys_come_as_asked(rank: Rank):
    """Torch's attention is as it was afterwards, also if an exception has passed through."""
    n, ranks = rank.world_size, Mesh.over(rank, context=rank.world_size).devices["context"]
    *tensors, _ = draw(4, 2, 24, 8, torch.float32)
    with kernels_on_cpu():
        for order, sent in (("torch", {"all_to_all_single": n - 1}), ("torch-gathered", {"all_gather_into_tensor": 1})):
            with pytest.raises(ArithmeticError), sharing_by_torch(ranks, 24, order) as own:
                assert torch.equal(own, positions(24, rank.rank, n, "zigzag"))
                assert F.scaled_dot_product_attention is not scaled_dot_product_attention
                with CommDebugMode() as log:
                    attention_op("sdpa-flash")(*(x[:, :, own] for x in tensors), causal=True)
                assert sent_by_torch(log) == sent
                raise ArithmeticError
            assert F.scaled_dot_product_attention is scaled_dot_product_attention


def attend_on_gpu(rank: Rank, attention):
    for d_head, length in itertools.product((64, 128), (512, 1536)):
        compare_with_whole(rank, attention, length, d_head, torch.bfloat16, 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
@pytest.mark.parametrize("attention", TORCH_CONTEXT_ATTENTIONS)
def test_torch_shares_attention_over_gpus(world_size, device, attention):
    """In bf16, in which partial outputs and gradients are rounded before they are added in fp32."""
    spawn(attend_on_gpu, world_size, attention, device=device)


test_on_two_ranks = on_each(2, checks_of(globals()))
test_on_four_ranks = on_each(4, checks_of(globals()))
