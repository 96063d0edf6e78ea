"""What the public CS336 assignment 2 suites ask of the data-parallel hooks in adapters.py, in our words.

Two gloo ranks start from different weights and train for five steps of SGD on halves of twenty examples, shuffled alike
after each step; a copy on rank 0 trains on all twenty. The weights of rank 0 must agree after every step, with
``torch.allclose`` as it comes. One model has frozen parameters, the other a tied weight. The 2025 suite wants a bucket
per tensor, two buckets, and one.
"""

import copy
import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.process_group import Rank

from .. import adapters
from .checks import on_ranks

N_EXAMPLES = 20


class WithFrozen(nn.Module):
    """(batch, 10) -> (batch, 5); a bias and a parameter that nothing uses are frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 10, bias=False), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 5, bias=False)
        )
        self.layers[2].bias.requires_grad_(False)
        self.fixed = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)

    def forward(self, x):
        return self.layers(x)


class WithTied(nn.Module):
    """(batch, 10) -> (batch, 5); the second and fourth layer are one weight."""

    def __init__(self):
        super().__init__()
        widths = (10, 10, 50, 10, 50, 5)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


HOOKS = {
    "2026": (adapters.get_ddp, lambda model, optimizer: None, adapters.ddp_on_after_backward),
    "individual": (
        adapters.get_ddp_individual_parameters,
        lambda model, optimizer: None,
        adapters.ddp_individual_parameters_on_after_backward,
    ),
} | {
    f"bucketed {mb}": (
        functools.partial(adapters.get_ddp_bucketed, bucket_size_mb=mb),
        adapters.ddp_bucketed_on_train_batch_start,
        adapters.ddp_bucketed_on_after_backward,
    )
    for mb in (0.0001, 0.0016, None)
}


def same_on_all_ranks(model):
    for tensor in model.module.state_dict().values():
        everyone = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        assert all(torch.allclose(other, tensor) for other in everyone)


def check(rank, world_size, wrap, before_batch, after_backward, model_class):
    torch.manual_seed(rank)
    alone = model_class()
    model = wrap(copy.deepcopy(alone))
    for (name, theirs), ours in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(theirs, ours) == (rank == 0 or "fixed" in name)
    same_on_all_ranks(model)

    shared = torch.Generator().manual_seed(7)
    x, y = torch.randn(N_EXAMPLES, 10, generator=shared), torch.randn(N_EXAMPLES, 5, generator=shared)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    share = slice(rank * N_EXAMPLES // world_size, (rank + 1) * N_EXAMPLES // world_size)
    for _ in range(5):
        before_batch(model, optimizers[0])
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        optimizers[1].step()
        if rank == 0:
            for ours, theirs in zip(alone.parameters(), model.parameters(), strict=True):
                assert torch.allclose(ours, theirs) == (not ours.requires_grad)
        nn.functional.mse_loss(model(x[share]), y[share]).backward()
        after_backward(model, optimizers[0])
        optimizers[0].step()
        if rank == 0:
            for ours, theirs in zip(alone.parameters(), model.parameters(), strict=True):
                assert torch.allclose(ours, theirs)
        order = torch.randperm(N_EXAMPLES, generator=shared)
        x, y = x[order], y[order]
    same_on_all_ranks(model)


def all_hooks(rank: Rank):
    for hooks in HOOKS.values():
        for model_class in (WithFrozen, WithTied):
            check(rank.rank, rank.world_size, *hooks, model_class)


def test_what_the_public_suites_ask():
    on_ranks(all_hooks, 2)
