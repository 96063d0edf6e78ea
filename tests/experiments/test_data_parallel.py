"""``benchmark_ddp``: its grid and refusals, its table from made-up rows, and cells measured on two gloo ranks."""

from dataclasses import replace
from statistics import median
from typing import get_args
from unittest.mock import patch

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import resolve_size
from cs336_systems.experiments.data_parallel import (
    DATA_PARALLEL,
    DataParallelCell,
    Rung,
    check_replicas,
    measure,
    phases_without_communication,
    reunite,
)
from cs336_systems.experiments.ranked import Effort, PreparedStep
from cs336_systems.profiling.traces import kineto
from cs336_systems.report.timeline import two_blocks
from tests.benchmarks.commands import cells_of
from tests.distributed.checks import on_each, spawn
from tests.report.rows import rows_of

SMALL = {"size": "tiny", "batch_size": 1, "context_length": 16, "optimizer": "torch-fused", "world_size": 2}
CELL = DataParallelCell(**SMALL, warmup=1, steps=3, ddp="bucketed", bucket_size_mb=0.1)
TORCH = replace(CELL, ddp="torch")


def test_bucket_sizes_multiply_only_the_rungs_that_have_them():
    made = cells_of("data_parallel", "--bucket-size-mb", "1", "10", "--world-size", "1", "2")
    assert [(cell.ddp, cell.bucket_size_mb) for cell in made if cell.world_size == 2] == [
        *(("naive", None), ("flat", None), ("overlapped", None)),
        *(("bucketed", 1.0), ("bucketed", 10.0), ("torch", 1.0), ("torch", 10.0)),
    ]
    assert len({cell.name for cell in made}) == 14
    for limit in (["-1"], ["0", "8"]):
        with pytest.raises(ValueError, match=f"--max-ctas .*{limit[-1]}"):
            cells_of("data_parallel", "--max-ctas", *limit)
    with pytest.raises(ValueError, match="--bucket-size-mb 1 10 is for --ddp bucketed and torch"):
        cells_of("data_parallel", "--ddp", "naive", "flat", "--bucket-size-mb", "1", "10")
    for asked, fault in (
        ([], "naive needs --trace"),
        (["--trace", "x", "--ddp", "torch"], "naive: only torch are measured"),
    ):
        with pytest.raises(ValueError, match=f"--recorded {fault}"):
            cells_of("data_parallel", "--recorded", "naive", *asked)


def outcome(cell, step_ms, **where):
    """A cell that was measured, or failed without a time; one millisecond of its step is exposed."""
    if step_ms is None:
        return rows_of([cell], [None])
    rate = cell.world_size * cell.tokens_per_step / step_ms * 1e3
    found = {"step": step_ms, "exposed": 1.0, "exposed_share": 100 / step_ms, "tokens_per_s": rate}
    return rows_of([cell], [found], **where)


def frame_of(*outcomes):
    return DATA_PARALLEL.of(pd.concat(outcomes, ignore_index=True)).frame


def column(name, *outcomes):
    return frame_of(*outcomes)[name].tolist()


@pytest.mark.slow
def test_ranks_scale_against_one_rank_of_the_same_rung_host_and_commit():
    one, two = cells_of("data_parallel", "--ddp", "bucketed", "--world-size", "1", "2")
    few, failed = replace(two, max_ctas=8), replace(two, ddp="naive", bucket_size_mb=None)
    longer = replace(one, steps=one.steps + 5, warmup=one.warmup + 1)
    several = [outcome(longer, 10.0), outcome(two, 12.5), outcome(few, 10.5), outcome(failed, None)]
    table = frame_of(*several)
    assert table["scaling %"].tolist() == ["100.0", "80.0", "95.2", "–"], "one rank sends nothing, by few or many"
    assert table["bucket MiB"].tolist() == ["25", "25", "25", ""]
    assert column("scaling %", outcome(one, 10.0), outcome(two, 12.5, host="another")) == ["100.0", "–"]
    again = [outcome(one, 10.0, commit="a"), outcome(two, 12.5, commit="a"), outcome(one, 8.0, commit="b")]
    assert column("scaling %", *again) == ["100.0", "80.0"]


def test_each_rung_stands_beside_torchs_in_the_same_round_with_what_rounds_differ_by():
    cells = cells_of("data_parallel", "--ddp", "naive", "bucketed", "torch", "--repeat", "2")
    times = dict(zip(cells, (12.0, 9.0, 10.0, 20.0, 19.0, 22.0), strict=True))
    ratios = column("/ torch", *(outcome(cell, ms) for cell, ms in times.items()))
    assert ratios == ["1.150 (1.100–1.200)", "0.925 (0.900–0.950)", "–"]
    elsewhere = [outcome(cell, ms, host="b" if cell.ddp == "torch" else "a") for cell, ms in times.items()]
    assert "/ torch" not in frame_of(*elsewhere)


def metrics_of(cell, rank, **effort):
    return {metric.name: metric for metric in measure(cell, rank, effort=Effort(**effort))}


def measure_all(rank, folder):
    """Ours, recorded; torch's; two turns of ours; and what becomes of replicas that drift apart."""
    found = [metrics_of(cell, rank, trace=path) for cell, path in ((CELL, folder), (TORCH, None))]
    turns = [metrics_of(replace(CELL, repeat=repeat), rank, later_warmup=0) for repeat in range(2)]
    drift(rank)
    return found, turns


def drift(rank):
    replica = PreparedStep(CELL, rank)
    for phase in phases_without_communication(replica).values():
        phase()
    parameter = next(replica.step.model.parameters())
    with pytest.raises(RuntimeError, match="parameters are not the same bits on all ranks"):
        check_replicas(replica)
    reunite(replica)
    check_replicas(replica)
    for state in replica.step.optimizer.state.values():
        moments = [torch.empty_like(state["exp_avg"]) for _ in range(2)]
        torch.distributed.all_gather(moments, state["exp_avg"])
        assert torch.equal(*moments)
    parameter.data.view(-1)[0].add_(rank.rank * 1e-6)
    with pytest.raises(RuntimeError, match="1 parameters are not the same bits on all ranks"):
        check_replicas(replica)


def check_gradients_are_sent_in_the_limited_group(rank):
    """Each rank is alone in the group that stands for NCCL's here, so that what is sent in it stays the rank's own."""
    groups = [dist.new_group([number]) for number in range(rank.world_size)]
    stand_in = {8: groups[rank.rank]}
    with patch("cs336_systems.training.parallel.limited_group", lambda _, max_ctas: stand_in[max_ctas]):
        for rung in get_args(Rung):
            cell = replace(CELL, ddp=rung, max_ctas=8)
            sending, alone = (PreparedStep(cell, rank) for _ in range(2))
            for phases in (sending.phases(), phases_without_communication(alone)):
                phases["forward"]()
                phases["backward"]()
            found, own = ([p.grad for p in prepared.step.model.parameters()] for prepared in (sending, alone))
            torch.testing.assert_close(found, own)


test_thread_blocks_are_limited = on_each(2, (check_gradients_are_sent_in_the_limited_group,))


@pytest.mark.slow
def test_cells_on_two_ranks(tmp_path):
    ((ours, torchs), (first, later)), ((of_second, *_), _) = spawn(measure_all, 2, tmp_path)
    gradient_mib = 4 * resolve_size("tiny").n_parameters / 2**20
    for metrics in (ours, torchs):
        for name in ("step", "forward", "backward", "optimizer", "local_step", "local_backward"):
            assert len(metrics[name].samples) == 3
        assert len(metrics["exposed"].samples) == 2  # one per round
        assert metrics["sent_per_rank"].samples[0] == pytest.approx(gradient_mib, rel=1e-3)
        assert metrics["tokens_per_s"].samples[0] == pytest.approx(2 * 16 / metrics["step"].samples[0] * 1e3)
    assert ours["collectives"].samples[0] > torchs["collectives"].samples[0] > 0
    assert of_second["step"] == ours["step"]  # slowest rank, told to all
    assert "hidden_share" not in ours  # a CPU's trace cannot tell
    trace = kineto.read(tmp_path / f"{CELL.name}.json.gz")
    assert len(trace.instances("backward", inside="step")) == 3
    begins, ends = two_blocks(trace)
    assert begins < ends
    # a later turn is shorter, and its bytes are not counted again
    assert len(first["warmup_step"].samples) == 1 and "warmup_step" not in later
    assert len(first["step"].samples) == len(later["step"].samples) == 3
    (*two, third), local = first["step"].samples, median(first["local_step"].samples)
    assert first["exposed"].samples == [median(two) - local, third - local]
    assert not {name for name in later if name.startswith(("local", "exposed", "collectives", "sent"))}
