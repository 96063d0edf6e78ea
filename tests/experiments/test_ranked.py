"""What experiments of several ranks share: one convention of what is sent, for rows of any age."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.experiments.data_parallel import DataParallelCell, Options
from cs336_systems.experiments.ranked import Effort, sent_metric
from cs336_systems.hardware import MIB
from cs336_systems.harness.traffic import Event


def sent(world_size, **mib):
    """MiB that a rank sends for collectives by c10d's names, of so many MiB as ``Traffic`` lists them."""
    events = [Event(kind, size * MIB, torch.float32) for kind, size in mib.items()]
    metric = sent_metric(events, world_size)
    assert metric.unit == "MiB per step, on a ring"
    return metric.samples[0]


def test_every_collective_counts_by_what_a_ring_carries():
    assert sent(2, allreduce=12) == 12
    assert sent(4, allreduce_coalesced=12) == 18
    assert sent(4, _allgather_base=12) == 9
    assert sent(4, reduce_scatter_tensor_coalesced=3) == 9  # listed by its output, a quarter of the whole
    assert sent(4, broadcast=12) == 12
    assert sent(1, allreduce=12) == 0
    with pytest.raises(ValueError, match="how much a ring sends for 'alltoall' is not known"):
        sent(2, alltoall=1)


def test_a_later_turn_warms_up_less_and_records_nothing(tmp_path):
    cell = DataParallelCell(ddp="torch", warmup=5)
    later = replace(cell, repeat=1)
    effort = Effort.of(Options(later_warmup=2, trace=tmp_path, recorded=("torch", "naive")))
    assert effort == Effort(later_warmup=2, trace=tmp_path, recorded=("torch", "naive"))
    assert (effort.warmup(cell), effort.warmup(later), Effort().warmup(later)) == (5, 2, 5)
    assert effort.recording(cell) == tmp_path / f"{cell.name}.json.gz"
    assert effort.recording(later) is effort.recording(replace(cell, ddp="flat")) is Effort().recording(cell) is None
    assert Effort(trace=tmp_path).recording(replace(cell, ddp="flat")) is not None
