"""``benchmark_parallelism``: its grid and refusals, and cells measured on four gloo ranks."""

from dataclasses import replace

import pytest
from torch.distributed.tensor.debug import CommDebugMode

from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.mesh import EXPERIMENT, MESH, PLAIN, MeshCell, make_cells, predicted_ms
from cs336_systems.experiments.mesh_measure import measure
from cs336_systems.experiments.mesh_messages import predicted_messages
from cs336_systems.experiments.ranked import scaling
from cs336_systems.refusals import command_refusal
from cs336_systems.report.command_line import parse
from tests.benchmarks.commands import cells_of
from tests.distributed.checks import on_ranks
from tests.distributed.test_torch_context import kernels_on_cpu, sent_by_torch
from tests.report.rows import rows_of

SMALL = {"size": "tiny", "batch_size": 2, "context_length": 16, "optimizer": "torch-fused", "keep": "products"}
CELL = MeshCell(**SMALL, world_size=4, warmup=1, steps=2)
FP8 = replace(CELL, tensor=2, matmul_dtype="e4m3", context_length=64)
MEASURED = [
    CELL,
    replace(CELL, tensor=2, context=2),
    replace(CELL, tensor=2, weights="fsdp"),
    replace(CELL, context=4, accumulate=2),
    replace(CELL, weights="fsdp", replicas=2),
    replace(CELL, tensor=4, tensor_by="copies"),
    *(replace(FP8, **way) for way in ({}, {"tensor_by": "copies", "dtype": "bf16"}, {"weights": "fsdp"})),
    replace(FP8, tensor=1, weights="fsdp", replicas=2, fp8_skip_first=1),
    *(replace(CELL, pipeline=2, accumulate=2, weights=weights) for weights in ("ddp", "fsdp")),
]
OTHERS = [replace(CELL, tensor=2, weights="fsdp2"), replace(CELL, part="attention", context=4)]
BY_AUTOGRAD = replace(CELL, part="attention", keep="autograd", attention="sdpa-flash")
BY_TORCH = replace(BY_AUTOGRAD, context=4, context_order="torch-gathered")
OTHERS += [BY_AUTOGRAD, BY_TORCH]
STAGED = replace(CELL, world_size=2, pipeline=2, accumulate=2)
STAGED_BY_TORCH = replace(STAGED, keep="autograd", pipeline_by="torch")


def test_every_division_of_the_ranks_is_a_cell():
    made = cells_of("mesh", "--world-size", "1", "2", "4", "--tensor", "1", "2", "--context", "1", "2")
    assert [cell.variant for cell in made] == [
        *("alone", "ddp-2", "zigzag-2", "tensor-2", "ddp-4", "ddp-2-zigzag-2", "ddp-2-tensor-2", "zigzag-2-tensor-2")
    ]
    for arguments, value in (
        (["--tensor", "3", "--context", "2", "--world-size", "4"], "--world-size 4 cannot be divided into tensor 3"),
        (["--tensor", "2", "--keep", "autograd"], "got autograd"),
        (["--pipeline-chunks", "2"], "--pipeline-chunks 2 is for --pipeline-schedule interleaved, got 1f1b"),
        (["--pipeline-schedule", "zb-h1", "zbv", "--pipeline-chunks", "2", "4"], "2 4 is for .*, got zb-h1 zbv"),
    ):
        with pytest.raises(ValueError, match=value):
            cells_of("mesh", *arguments)


def test_chunks_are_a_column_of_two_unless_the_schedule_interleaved_has_others():
    asked = ["--size", "small", "--batch-size", "2", "--world-size", "2", "--tensor", "1", "--context", "1"]
    asked += ["--pipeline", "1", "2", "--accumulate", "4", "--pipeline-schedule", "1f1b", "interleaved"]
    plain = cells_of("mesh", *asked)
    assert [(cell.variant, cell.pipeline_chunks) for cell in plain] == [
        *(("ddp-2", 2), ("1f1b-2", 2), ("interleaved-2", 2))
    ]
    assert cells_of("mesh", *asked, "--pipeline-chunks", "2") == plain
    found = [cell for cell in cells_of("mesh", *asked, "--pipeline-chunks", "2", "3") if cell not in plain]
    assert [(cell.variant, cell.pipeline_chunks) for cell in found] == [("interleaved-2", 3)]


OURS = ["--attention", "hopper", "--kernels", "fused", "--optimizer", "fused", "--master-weights", "fp32"]


def attention_cells(*arguments, device="cuda"):
    """The cells of attention alone on one and two ranks, without asking for GPUs."""
    asked = ["--part", "attention", "--size", "llama3.1-8b", "--dtype", "bf16", "--context-length", "65536"]
    asked += ["--world-size", "1", "2", "--tensor", "1", "--context", "1", "2", "--device", device]
    return make_cells(parse(EXPERIMENT.options, [*asked, *arguments], None))


def test_torchs_context_parallelism_is_beside_attention_alone():
    made = attention_cells(*OURS, "--context-order", "zigzag", "gathered", "--peer")
    assert [(cell.variant, cell.attention) for cell in made] == [
        *(("alone", "hopper"), ("zigzag-2", "hopper"), ("gathered-2", "hopper")),
        *(("alone", "sdpa-cudnn"), ("torch-2", "sdpa-cudnn"), ("torch-gathered-2", "sdpa-cudnn")),
    ]
    for cell in made:
        assert command_refusal(cell) is None
        assert cell.attention_alone
    rates = (100, 190, 180, 80, 120, 140)
    rows = rows_of(made, [{"tokens_per_s": rate} for rate in rates], gpu="NVIDIA H200")
    lines = MESH.lines(rows)
    of_one_gpu = [scaling(line, tensor=1, context=1, **PLAIN) for line in lines]
    assert of_one_gpu == [100, 95, 90, 100, 75, 87.5]  # torch's ranks by torch's attention on one
    assert [predicted_ms(line) for line in lines] == 6 * [None]
    assert not [cell for cell in attention_cells("--peer", device="cpu") if not cell.written_out]
    by_torch = ["--keep", "autograd", "--attention", "sdpa-flash", "--context-order", "torch"]
    assert attention_cells(*by_torch, "--peer") == attention_cells(*by_torch)
    with pytest.raises(ValueError, match="not a whole step"):
        attention_cells(*by_torch, "--part", "step")


def test_torchs_pipelines_are_beside_this_suites():
    asked = ["--size", "tiny", "--dtype", "bf16", "--device", "cuda", "--world-size", "2", "--tensor", "1"]
    asked += ["--context", "1", "--pipeline", "2", "--pipeline-schedule", "1f1b", "zb-h1", "--accumulate", "4"]
    made = make_cells(parse(EXPERIMENT.options, [*asked, *OURS, "--peer"], None))
    assert [(cell.variant, cell.compile) for cell in made] == [
        *(("1f1b-2", "off"), ("zb-h1-2", "off")),
        *(("1f1b-2-torch", "on"), ("zb-h1-2-torch", "loss")),
    ]
    assert not [cell for cell in made if command_refusal(cell)]
    by_torch = [*asked, "--keep", "autograd", "--compile", "loss", "--pipeline-by", "torch"]
    cells = make_cells(parse(EXPERIMENT.options, by_torch, None))
    assert cells == make_cells(parse(EXPERIMENT.options, [*by_torch, "--peer"], None))


def measure_all(rank: Rank):
    with kernels_on_cpu():
        return [measure(cell, rank) for cell in MEASURED + OTHERS]


def measure_stages(rank: Rank):
    return [measure(cell, rank) for cell in (STAGED, STAGED_BY_TORCH)]


@pytest.mark.slow
def test_stages_of_both_are_measured():
    for metrics in on_ranks(measure_stages, 2):
        ours, torchs = ({metric.name for metric in own} for own in metrics)
        assert ours >= torchs | {"idle", "messages"}
        found = {metric.name: metric.samples[0] for metric in metrics[0]}
        assert found["messages"] == found["predicted_messages"] > 0
        assert torchs >= {"passes", "optimizer", "step", "tokens_per_s"}
    lines = MESH.lines(rows_of([STAGED, STAGED_BY_TORCH], metrics))
    assert [line.settings["pipeline_by"] for line in lines] == ["messages", "torch"]


def test_what_stages_copy_is_no_message():
    copied = replace(STAGED, pipeline_by="copies")
    assert predicted_messages(copied, 0) == predicted_messages(STAGED, 0)  # CPUs send messages
    assert predicted_messages(replace(copied, device="cuda"), 0) == 4  # the loss


def measure_by_torch(rank: Rank):
    with kernels_on_cpu(), CommDebugMode() as log:
        measure(BY_TORCH, rank)
    return sent_by_torch(log)


@pytest.mark.slow
def test_torch_shares_what_is_timed():
    steps = BY_TORCH.warmup + BY_TORCH.steps
    expected = {"all_gather_into_tensor": 2 * steps, "all_to_all_single": 4 * steps}  # of keys; of their gradients
    assert on_ranks(measure_by_torch, 4) == 4 * [expected]


@pytest.mark.slow
def test_messages_are_those_predicted():
    for metrics in on_ranks(measure_all, 4):
        for cell, own in zip(MEASURED, metrics[: len(MEASURED)], strict=True):
            found = {metric.name: metric.samples[0] for metric in own}
            assert found["messages"] == found["predicted_messages"] > 0, cell
    assert len(MESH.of(rows_of(MEASURED + OTHERS, metrics)).frame) == len(MEASURED + OTHERS)
