"""What the public CS336 assignment 2 suites ask of ``get_sharded_optimizer``, in our words.

Two ranks with the same seed train a small net, with tied and with separate weights, for ten steps of AdamW on the same
data, and the parameters must be those of the unsharded optimizer to 1e-7.
"""

import itertools

import torch
from torch import nn

from cs336_systems.distributed.process_group import Rank

from .. import adapters
from .checks import on_ranks

HYPERPARAMETERS = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def build(tied: bool) -> nn.Module:
    """Linear maps 10 -> 50 -> 10 -> 50 -> 5; one parameter is frozen."""
    torch.manual_seed(42)
    maps = [nn.Linear(a, b, bias=i == 1) for i, (a, b) in enumerate(itertools.pairwise([10, 50, 10, 50, 5]))]
    maps[1].bias.requires_grad_(False)
    if tied:
        maps[2].weight = maps[0].weight
    return nn.Sequential(*(layer for linear in maps[:-1] for layer in (linear, nn.ReLU())), maps[-1])


def ten_steps(rank: Rank) -> None:
    for tied in (True, False):
        model, expected = build(tied), build(tied)
        sharded = adapters.get_sharded_optimizer(model.parameters(), torch.optim.AdamW, **HYPERPARAMETERS)
        alone = torch.optim.AdamW(expected.parameters(), **HYPERPARAMETERS)
        generator = torch.Generator().manual_seed(int(tied))
        for _ in range(10):
            x, y = torch.rand(32, 10, generator=generator), torch.rand(32, 5, generator=generator)
            for module, optimizer in ((model, sharded), (expected, alone)):
                optimizer.zero_grad()
                (y - module(x)).square().sum().backward()
                optimizer.step()
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
        assert 0 < len(sharded.state) < len(alone.state)


def test_ten_steps_are_those_of_the_unsharded_optimizer():
    on_ranks(ten_steps, 2)
