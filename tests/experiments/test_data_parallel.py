"""A data-parallel cell measured on two gloo ranks: its metrics, its check of the replicas, and what Traffic sees."""

from dataclasses import replace
from statistics import median

import pytest
import torch

from cs336_systems.config import resolve_size
from cs336_systems.distributed.spawn import RankFailed, spawn
from cs336_systems.experiments.data_parallel import DataParallelCell, PreparedReplica, measure
from cs336_systems.experiments.ranked import Effort
from cs336_systems.profiling.traces import kineto
from cs336_systems.report.timeline import two_blocks

CELL = DataParallelCell(
    size="tiny",
    batch_size=1,
    context_length=16,
    optimizer="torch-fused",
    warmup=1,
    steps=3,
    world_size=2,
    ddp="bucketed",
    bucket_size_mb=0.1,
)
TORCH = replace(CELL, ddp="torch")
BF16 = replace(CELL, communication_dtype="bf16", dtype="autocast-bf16", steps=1)


def measure_three(rank, folder):
    return [
        {metric.name: metric for metric in measure(cell, rank, effort=Effort(trace=trace))}
        for cell, trace in ((CELL, folder), (TORCH, None), (BF16, None))
    ]


@pytest.mark.slow
def test_metrics_of_ours_and_of_torchs(tmp_path):
    first, second = spawn(measure_three, 2, tmp_path, timeout_s=60)
    ours, torchs, bf16 = first
    gradient_mib = 4 * resolve_size("tiny").n_parameters / 2**20
    for metrics in (ours, torchs):
        for name in ("step", "forward", "backward", "optimizer", "local_step", "local_backward"):
            assert len(metrics[name].samples) == 3
        assert len(metrics["exposed"].samples) == 2  # one per round
        assert metrics["sent_per_rank"].samples[0] == pytest.approx(gradient_mib, rel=1e-3)
        assert metrics["tokens_per_s"].samples[0] == pytest.approx(2 * 16 / metrics["step"].samples[0] * 1e3)
    assert ours["collectives"].samples[0] > torchs["collectives"].samples[0] > 0
    assert bf16["sent_per_rank"].samples[0] == pytest.approx(gradient_mib / 2, rel=1e-3)
    assert len(bf16["step"].samples) == 1
    assert second[0]["step"] == ours["step"]  # slowest rank, told to all
    assert "hidden_share" not in ours  # a CPU's trace cannot tell
    trace = kineto.read(tmp_path / f"{CELL.name}.json.gz")
    assert len(trace.instances("step")) == 3
    assert len(trace.instances("backward", inside="step")) == 3
    close_up = two_blocks(trace)
    assert list(close_up.blocks["name"]) == ["layers.1", "layers.0"]
    assert len(close_up.collectives)


def measure_turns(rank):
    effort = Effort(later_warmup=0, local_steps=1)
    turns = [replace(CELL, repeat=repeat) for repeat in range(2)]
    return [{metric.name: metric for metric in measure(cell, rank, effort=effort)} for cell in turns]


@pytest.mark.slow
def test_a_later_turn_is_shorter_and_its_bytes_are_not_counted_again():
    first, later = spawn(measure_turns, 2, timeout_s=60)[0]
    assert len(first["warmup_step"].samples) == 1
    assert "warmup_step" not in later
    assert len(first["step"].samples) == len(later["step"].samples) == 3
    (*two, third), [local] = first["step"].samples, first["local_step"].samples
    assert first["exposed"].samples == [median(two) - local, third - local]
    assert not {name for name in later if name.startswith(("local", "exposed", "collectives", "sent"))}


def drift(rank):
    replica = PreparedReplica(CELL, rank)
    for phase in replica.phases(communicate=False).values():
        phase()
    parameter = next(replica.step.model.parameters())
    with pytest.raises(RuntimeError, match="parameters are not the same bits on all ranks"):
        replica.check_replicas()
    replica.reunite()
    replica.check_replicas()
    for state in replica.step.optimizer.state.values():
        moments = [torch.empty_like(state["exp_avg"]) for _ in range(2)]
        torch.distributed.all_gather(moments, state["exp_avg"])
        assert torch.equal(*moments)
    parameter.data.view(-1)[0].add_(rank.rank * 1e-6)
    replica.check_replicas()


@pytest.mark.slow
def test_replicas_that_drift_apart_fail_the_cell():
    with pytest.raises(RankFailed, match="1 parameters are not the same bits on all ranks"):
        spawn(drift, 2, timeout_s=60)
