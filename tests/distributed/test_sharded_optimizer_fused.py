"""Stochastic rounding under the sharded optimizer: every rank draws for its share what one rank draws for the whole."""

import pytest
import torch
from torch import nn

from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.spawn import spawn
from tests.kernels.interpreter import interpret_without_gpu

from .sharding_models import FORMS, TINY_BUCKETS


def same_bits_as_alone(rank: Rank) -> None:
    """Ranks hold the same gradients, whose average is what one rank has."""
    interpret_without_gpu()
    from cs336_systems.training.fused_adamw import FusedAdamW

    for form in FORMS:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 5), (301,), (3,), (20, 20))]
        alone, together = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
        whole = FusedAdamW(alone[:3], lr=0.1)
        shared = ShardedOptimizer(together[:3], FusedAdamW, reduce_gradients=form, **TINY_BUCKETS, lr=0.1)
        for optimizer, parameters in ((whole, alone), (shared, together)):
            optimizer.add_param_group({"params": parameters[3:]})
            for step in range(3):
                noise = torch.Generator().manual_seed(step)
                weights = [torch.randn(value.shape, generator=noise).bfloat16() for value in values]
                sum((p * w).sum() for p, w in zip(parameters, weights, strict=True)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)), form


@pytest.mark.slow
def test_two_ranks_round_as_one() -> None:
    spawn(same_bits_as_alone, 2)
