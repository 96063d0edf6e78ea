"""Torch's tensor parallelism trains what one process trains, so that it is a fair peer."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.distributed.process_group import Rank
from cs336_systems.ranks import Parallel
from cs336_systems.training import assemble, random_batch
from tests.distributed.checks import on_ranks
from tests.distributed.test_mesh import LLAMA, QWEN2
from tests.training.shared import Shared

BIASED = replace(QWEN2, tie_embeddings=False)
TORCH = Parallel(tensor=2, tensor_by="torch")
CASES = [Shared.of(config, batch_size=2, optimizer="torch-fused", how=TORCH) for config in (LLAMA, BIASED)]


def losses_of(case, rank=None):
    step, batch = assemble(case, rank), random_batch(case, rank)
    return torch.tensor([step(*batch).item() for _ in range(3)])


def train(rank: Rank):
    return [losses_of(case, rank) for case in CASES]


@pytest.mark.slow
def test_losses_are_those_of_one_process():
    for of_rank in on_ranks(train, 2):
        for case, losses in zip(CASES, of_rank, strict=True):
            torch.testing.assert_close(losses, losses_of(replace(case, how=Parallel())), rtol=2e-6, atol=0)
