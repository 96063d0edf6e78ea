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


def net(tied: bool) -> nn.Module:
    """(batch, 10) -> (batch, 5); the second and third layer are one weight, or a bias and a spare one are frozen."""
    widths = (10, 10, 10, 50, 5) if tied else (10, 10, 50, 5)
    maps = [nn.Linear(a, b, bias=i == 1 and not tied) for i, (a, b) in enumerate(itertools.pairwise(widths))]
    model = nn.Sequential(*itertools.chain.from_iterable((linear, nn.ReLU()) for linear in maps[:-1]), maps[-1])
    if tied:
        maps[1].weight = maps[0].weight
    else:
        maps[1].bias.requires_grad_(False)
        model.register_parameter("fixed", nn.Parameter(torch.full((2,), 2.0), requires_grad=False))
    return model


def same_on_all_ranks(model) -> bool:
    for tensor in model.module.state_dict().values():
        everyone = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        if not all(torch.allclose(other, tensor) for other in everyone):
            return False
    return True


def all_hooks(rank: Rank):
    for (wrap, before_batch, after_backward), tied in itertools.product(HOOKS.values(), (True, False)):
        torch.manual_seed(rank.rank)
        alone = net(tied)
        model = wrap(copy.deepcopy(alone))
        for (name, theirs), ours in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(theirs, ours) == (rank.rank == 0 or "fixed" in name)
        assert same_on_all_ranks(model)
        shared = torch.Generator().manual_seed(7)
        x, y = torch.randn(N_EXAMPLES, 10, generator=shared), torch.randn(N_EXAMPLES, 5, generator=shared)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
        for _ in range(5):
            before_batch(model, optimizers[0])
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.mse_loss(alone(x), y).backward()
            optimizers[1].step()
            own = slice(rank.rank * N_EXAMPLES // rank.world_size, (rank.rank + 1) * N_EXAMPLES // rank.world_size)
            nn.functional.mse_loss(model(x[own]), y[own]).backward()
            after_backward(model, optimizers[0])
            optimizers[0].step()
            if rank.rank == 0:
                assert all(map(torch.allclose, alone.parameters(), model.parameters()))
            order = torch.randperm(N_EXAMPLES, generator=shared)
            x, y = x[order], y[order]
        assert same_on_all_ranks(model)


def test_what_the_public_suites_ask():
    on_ranks(all_hooks, 2)
