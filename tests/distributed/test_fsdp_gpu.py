"""FSDP over NCCL: the arithmetic of one process again, and communication under compute, which GPUs alone can show."""

import pytest

from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.spawn import spawn
from cs336_systems.experiments.fully_sharded.measure import FullyShardedCell, measure_fully_sharded

from .test_ddp import on_gpus
from .test_fsdp import (
    a_parameter_that_one_rank_alone_uses,
    accumulation_equals_one_large_batch,
    clipping_bites,
    half_precision_equals_the_same_arithmetic_in_one_process,
    parity_of_blocks_with_adamw,
    parity_of_every_kind_of_parameter,
    parity_without_look_ahead_and_with_much,
    run_checks,
    unusual_orders_of_passes,
)
from .test_fsdp_schedule import a_forward_that_changes_course_still_is_right

CHECKS = [
    parity_of_blocks_with_adamw,
    parity_without_look_ahead_and_with_much,
    parity_of_every_kind_of_parameter,
    a_parameter_that_one_rank_alone_uses,
    accumulation_equals_one_large_batch,
    unusual_orders_of_passes,
    half_precision_equals_the_same_arithmetic_in_one_process,
    clipping_bites,
    a_forward_that_changes_course_still_is_right,
]

CELL = FullyShardedCell(
    device="cuda",
    fsdp="ours",
    size="large",
    batch_size=4,
    context_length=512,
    dtype="fp32",
    attention="reference",
    checkpoint="none",
    compile="off",
    prefetch=1,
    optimizer="torch-fused",
    world_size=2,
    warmup=2,
    steps=3,
    repeat=0,
    seed=0,
)


def run_checks_on_gpus(rank: Rank):
    with rank.device:
        return run_checks(rank, CHECKS)


def hidden_share(rank: Rank, folder):
    """The percentage of communication that ran beside other kernels (rank 0 alone knows)."""
    found = {metric.name: metric.samples[0] for metric in measure_fully_sharded(CELL, rank, trace=folder)}
    return found.get("hidden_share")


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_arithmetic_is_that_of_one_process(world_size, device):
    for ended in spawn(run_checks_on_gpus, world_size, device=device, timeout_s=120):
        assert ended == dict.fromkeys(ended)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_communication_lies_under_compute(world_size, device, tmp_path):
    assert spawn(hidden_share, world_size, tmp_path, device=device, timeout_s=120)[0] >= 90
