"""What the public CS336 assignment 2 suite of 2026 asks of the FSDP hooks in adapters.py, in our words.

Two gloo ranks train for three steps of SGD on halves of twenty sequences, shuffled alike after each step; a copy trains
on all twenty, its matrices cast to the compute dtype for each step, its norms in fp32. Gathered parameters must agree
to 1e-6 absolute and 1e-4 relative in fp32, to 1e-4 in fp16. Gradients have their parameter's shape and dtype, and those
of what is not sharded are the same on all ranks.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.process_group import Rank
from cs336_systems.model.layers import Embedding, Linear
from cs336_systems.model.ops import REFERENCE_OPS

from .. import adapters
from .checks import on_ranks

MATRICES = (Linear, Embedding)
N_WORDS = 100


class WideNorm(nn.Module):
    """Root-mean-square norm that computes in fp32 and returns the dtype of its input."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(x.dtype)


class Words(nn.Module):
    """Ids (batch, seq) -> scores (batch, seq, words)."""

    def __init__(self):
        super().__init__()
        self.embedding = Embedding(N_WORDS, 64, REFERENCE_OPS)
        self.first_norm = WideNorm(64)
        self.up = Linear(64, 128, REFERENCE_OPS)
        self.second_norm = WideNorm(128)
        self.down = Linear(128, 64, REFERENCE_OPS)
        self.head = Linear(64, N_WORDS, REFERENCE_OPS)
        for module in self.modules():
            if isinstance(module, MATRICES):
                module.reset_parameters()

    def forward(self, ids):
        x = torch.relu(self.up(self.first_norm(self.embedding(ids))))
        return self.head(self.down(self.second_norm(x)))


def loss_of(scores, labels):
    return nn.functional.cross_entropy(scores[:, -1].float(), labels)


def step_in(model, compute_dtype, ids, labels):
    """Loss and gradients of a model whose matrices are cast; leaves fp32 gradients."""
    low = copy.deepcopy(model)
    for module in low.modules():
        if isinstance(module, MATRICES):
            module.to(compute_dtype)
    loss_of(low(ids), labels).backward()
    for parameter, cast in zip(model.parameters(), low.parameters(), strict=True):
        parameter.grad = cast.grad.float()


def train(rank: Rank):
    torch.use_deterministic_algorithms(True)
    for compute_dtype in (None, torch.float16):
        torch.manual_seed(42)
        alone = Words()
        sharded = adapters.get_fsdp(copy.deepcopy(alone), compute_dtype=compute_dtype)
        theirs = torch.optim.SGD(alone.parameters(), lr=0.01)
        ours = torch.optim.SGD(sharded.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(123)
        ids = torch.randint(N_WORDS, (20, 8), generator=generator)
        labels = torch.randint(N_WORDS, (20,), generator=generator)
        absolute = 1e-6 if compute_dtype is None else 1e-4
        for _ in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            step_in(alone, compute_dtype or torch.float32, ids, labels)
            theirs.step()
            half = slice(10 * rank.rank, 10 * (rank.rank + 1))
            loss_of(sharded(ids[half]), labels[half]).backward()
            adapters.fsdp_on_after_backward(sharded, ours)
            check_gradients(sharded.module)
            ours.step()
            full = adapters.fsdp_gather_full_params(sharded)
            for name, parameter in alone.named_parameters():
                assert torch.allclose(parameter, full[name], atol=absolute, rtol=1e-4), (compute_dtype, name)
            order = torch.randperm(20, generator=generator)
            ids, labels = ids[order], labels[order]


def check_gradients(module):
    for name, parameter in module.named_parameters():
        assert parameter.grad.shape == parameter.shape, name
        assert parameter.grad.dtype == parameter.dtype == torch.float32, name
        if not isinstance(module.get_submodule(name.rpartition(".")[0]), MATRICES):
            gathered = [torch.zeros_like(parameter.grad) for _ in range(2)]
            dist.all_gather(gathered, parameter.grad)
            assert torch.equal(*gathered), name


def test_training_is_that_of_one_process():
    on_ranks(train, 2)
