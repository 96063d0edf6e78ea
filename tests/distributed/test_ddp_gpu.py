"""Overlap, which only a GPU's trace shows: communication lies under backward where it starts during backward.

The batch is large enough that GPUs, not hosts, set the pace: kernels that a late host leaves gaps between hide nothing.
"""

import dataclasses

import pytest

from cs336_systems.distributed.spawn import spawn
from cs336_systems.experiments.data_parallel.measure import DataParallelCell, measure_data_parallel

from .test_ddp import on_gpus

CELL = DataParallelCell(
    device="cuda",
    ddp="bucketed",
    bucket_size_mb=25.0,
    communication_dtype="same",
    size="medium",
    batch_size=16,
    context_length=512,
    dtype="fp32",
    compile="off",
    optimizer="torch-fused",
    world_size=2,
    warmup=3,
    steps=4,
    seed=0,
)
RUNGS = {"naive": None, "flat": None, "overlapped": None, "bucketed": 25.0}


def hidden_shares(rank, folder):
    """By rung: the percentage of communication that ran beside other kernels (rank 0 alone knows)."""
    shares = {}
    for rung, mb in RUNGS.items():
        cell = dataclasses.replace(CELL, ddp=rung, bucket_size_mb=mb)
        found = {metric.name: metric.samples[0] for metric in measure_data_parallel(cell, rank, trace=folder)}
        shares[rung] = found.get("hidden_share")
    return shares


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_communication_lies_under_backward(world_size, device, tmp_path):
    shares = spawn(hidden_shares, world_size, tmp_path, device=device, timeout_s=120)[0]
    assert shares["overlapped"] >= 90
    assert shares["bucketed"] >= 90
    assert shares["naive"] < 10
    assert shares["flat"] < 10
