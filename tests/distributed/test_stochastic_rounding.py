"""Stochastic rounding of shards: every rank draws for its share what one rank draws for the whole; states anywhere."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.kernels.interpreter import interpret_without_gpu

from .checks import on_each
from .sharding_models import FORMS, TINY_BUCKETS

SHAPES = ((7, 5), (301,), (3,), (20, 20), (1, 9))


def random(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


class Products(nn.Module):
    """Weights -> the sum of their products with the parameters, whose gradients they are therefore, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList(random(seed=100))

    def forward(self, *weights: Tensor) -> Tensor:
        return sum((p * w).sum() for p, w in zip(self.own, weights, strict=True))


OFFLOADS = ((), ("exp_avg", "exp_avg_sq"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Ranks see the same gradients, whose average is what one rank has."""
    for step in range(3):
        model(*random(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone() -> list[Tensor]:
    from cs336_systems.training.fused_adamw import FusedAdamW

    model = Products()
    train(model, FusedAdamW(model.parameters(), lr=0.1))
    return [parameter.detach() for parameter in model.parameters()]


def sharded_optimizer(rank: Rank) -> None:
    interpret_without_gpu()
    from cs336_systems.training.fused_adamw import FusedAdamW

    for form, offload in product(FORMS, OFFLOADS):
        model = Products()
        *first, last = model.parameters()
        options = {**TINY_BUCKETS, "lr": 0.1, "offload": offload}
        optimizer = ShardedOptimizer(first, FusedAdamW, reduce_gradients=form, **options)
        optimizer.add_param_group({"params": [last]})
        train(model, optimizer)
        assert all(map(torch.equal, model.parameters(), alone())), (form, offload)


def fsdp(rank: Rank) -> None:
    interpret_without_gpu()
    from cs336_systems.training.fused_adamw import FusedAdamW

    for offload in OFFLOADS:
        model = FSDP(Products())
        train(model, FusedAdamW(model.parameters(), lr=0.1, offload=offload))
        assert all(map(torch.equal, model.gather_full_params().values(), alone())), offload


CHECKS = (sharded_optimizer, fsdp)
test_two_ranks_round_as_one = pytest.mark.slow(on_each(2, CHECKS))
