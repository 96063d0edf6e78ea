"""The sharded optimizer over NCCL: in-place collectives on shards, fused kernels on slices, state on GPUs."""

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

from .checks import on_ranks
from .sharding_models import FORMS, TINY_BUCKETS, Toy, flat, train

FUSED = {"lr": 0.01, "weight_decay": 0.1, "fused": True}


def train_on_gpus(rank: Rank) -> None:
    """Five steps; fp64 shows any other arithmetic."""
    for dtype in (torch.float64, torch.float32):
        alone = Toy().to(rank.device, dtype)
        train(alone, torch.optim.AdamW(alone.parameters(), **FUSED), range(5), rank.world_size, rank.rank)
        for form in FORMS:
            together = Toy().to(rank.device, dtype)
            options = {"reduce_gradients": form, **TINY_BUCKETS, **FUSED}
            optimizer = ShardedOptimizer(together.parameters(), torch.optim.AdamW, **options)
            train(together, optimizer, range(5), rank.world_size, rank.rank)
            values = [torch.empty_like(flat(together)) for _ in range(rank.world_size)]
            dist.all_gather(values, flat(together))
            assert all(torch.equal(value, values[0]) for value in values)
            if dtype == torch.float64:
                torch.testing.assert_close(flat(together), flat(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_on_gpus_is_that_of_one(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    on_ranks(train_on_gpus, world_size, device="cuda")
