"""Stochastic rounding of shards: every rank draws for its share what one rank draws for the whole; states anywhere."""

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from tests.kernels.interpreter import interpret_without_gpu

from .checks import on_ranks
from .sharding_models import TINY_BUCKETS

SHAPES = ((7, 5), (301,), (3,), (1, 9))
MOMENTS = ("exp_avg", "exp_avg_sq")


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Ranks see the same gradients, whose average is what one rank has; the parameters after two steps."""
    for step in range(2):
        model(*random(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.gather_full_params().values()) if isinstance(model, FSDP) else list(model.parameters())


def every_division(rank: Rank) -> None:
    interpret_without_gpu()
    from cs336_systems.training.fused_adamw import FusedAdamW

    model = Products()
    alone = train(model, FusedAdamW(model.parameters(), lr=0.1))
    for form, offload in ((None, ()), ("reduce-scatter", ()), ("reduce-scatter", MOMENTS)):
        model = Products()
        *first, last = model.parameters()
        options = {**TINY_BUCKETS, "lr": 0.1, "offload": offload}
        optimizer = ShardedOptimizer(first, FusedAdamW, reduce_gradients=form, **options)
        optimizer.add_param_group({"params": [last]})
        assert all(map(torch.equal, train(model, optimizer), alone)), (form, offload)
    for offload in ((), MOMENTS):
        fsdp = FSDP(Products(), units=lambda module: isinstance(module, Products))
        own = FusedAdamW(fsdp.parameters(), lr=0.1, offload=offload)
        assert all(map(torch.equal, train(fsdp, own), alone)), offload


@pytest.mark.slow
def test_two_ranks_round_as_one():
    on_ranks(every_division, 2)
