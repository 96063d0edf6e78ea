"""Overlap, which only a GPU's trace shows: communication lies under backward where it starts during backward.

The batch is large enough that GPUs, not hosts, set the pace: kernels that a late host leaves gaps between hide nothing.
"""

from statistics import median

import pytest

from cs336_systems.experiments.data_parallel import DataParallelCell, measure
from cs336_systems.experiments.ranked import Effort
from cs336_systems.profiling.communication import communication_metrics
from cs336_systems.profiling.traces import kineto

from .checks import on_gpus, on_ranks

COMMON = {"device": "cuda", "context_length": 512, "dtype": "fp32", "compile": "off", "optimizer": "torch-fused"}
COMMON |= {"world_size": 2, "warmup": 3, "steps": 4, "seed": 0}
RUNGS = {"naive": None, "flat": None, "overlapped": None, "bucketed": 25.0}
CELLS = [
    DataParallelCell(**COMMON, ddp=rung, bucket_size_mb=mb, communication_dtype="same", size="medium", batch_size=16)
    for rung, mb in RUNGS.items()
]


def hidden_shares(rank, measure, cells, folder):
    """The percentage of each cell's communication that ran beside other kernels, the median of its recorded steps.

    Rank 0 alone records; the list of any other is empty.
    """
    effort = Effort(trace=folder)
    for cell in cells:
        measure(cell, rank, effort=effort)
    if rank.rank:
        return []
    recordings = [kineto.read(effort.recording(cell)) for cell in cells]
    found = [{metric.name: metric.samples for metric in communication_metrics(trace)} for trace in recordings]
    return [median(metrics["hidden_share"]) for metrics in found]


@pytest.mark.timing
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_communication_lies_under_backward(world_size, device, tmp_path):
    found = on_ranks(hidden_shares, world_size, measure, CELLS, tmp_path, device=device)[0]
    shares = dict(zip(RUNGS, found, strict=True))
    assert shares["overlapped"] >= 90
    assert shares["bucketed"] >= 90
    assert shares["naive"] < 10
    assert shares["flat"] < 10
