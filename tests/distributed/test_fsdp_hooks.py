"""The public CS336 assignment 2 suite of 2026 asks this of the FSDP hooks in adapters.py; the words are ours.

Two gloo ranks train for three steps of SGD on halves of twenty sequences; a copy trains on all, its matrices cast to
the compute dtype for each step, its norm in fp32. Gathered parameters agree to 1e-6 absolute and 1e-4 relative in fp32,
to 1e-4 in fp16. Gradients have their parameter's shape and dtype, and those of whole parameters are equal everywhere.
"""

import copy

import torch
from torch import nn

from cs336_systems.distributed.process_group import Rank
from cs336_systems.model.layers import Embedding, Linear
from cs336_systems.model.ops import REFERENCE_OPS

from .. import adapters
from .checks import on_ranks
from .fsdp_models import same_on_all_ranks


class WideNorm(nn.Module):
    """Root-mean-square norm that computes in fp32 and returns the dtype of its input."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(x.dtype)


def words():
    """Ids (batch, seq) -> scores (batch, seq, 100)."""
    maps = [Linear(64, 128, REFERENCE_OPS), nn.ReLU(), Linear(128, 100, REFERENCE_OPS)]
    model = nn.Sequential(Embedding(100, 64, REFERENCE_OPS), WideNorm(64), *maps)
    for module in model:
        if isinstance(module, (Linear, Embedding)):
            module.reset_parameters()
    return model


def loss_of(scores, labels):
    return nn.functional.cross_entropy(scores[:, -1].float(), labels)


def train(rank: Rank):
    for compute_dtype, absolute in ((None, 1e-6), (torch.float16, 1e-4)):
        torch.manual_seed(42)
        alone = words()
        sharded = adapters.get_fsdp(copy.deepcopy(alone), compute_dtype=compute_dtype)
        theirs, ours = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (alone, sharded))
        for _ in range(3):
            ids, labels = torch.randint(100, (20, 8)), torch.randint(100, (20,))
            theirs.zero_grad()
            ours.zero_grad()
            low = copy.deepcopy(alone)
            for module in low:
                if not isinstance(module, WideNorm):
                    module.to(compute_dtype)
            loss_of(low(ids), labels).backward()
            for parameter, cast in zip(alone.parameters(), low.parameters(), strict=True):
                parameter.grad = cast.grad.float()
            loss_of(sharded(ids.chunk(2)[rank.rank]), labels.chunk(2)[rank.rank]).backward()
            adapters.fsdp_on_after_backward(sharded, ours)
            for parameter in sharded.module.parameters():
                assert parameter.grad.shape == parameter.shape
                assert parameter.grad.dtype == parameter.dtype == torch.float32
            assert same_on_all_ranks({"norm": sharded.module[1].weight.grad})
            theirs.step()
            ours.step()
            full = adapters.fsdp_gather_full_params(sharded)
            for name, parameter in alone.named_parameters():
                assert torch.allclose(parameter, full[name], atol=absolute, rtol=1e-4), (compute_dtype, name)


def test_training_is_that_of_one_process():
    on_ranks(train, 2)
