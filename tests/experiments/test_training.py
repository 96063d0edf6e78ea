"""``benchmark_training.py``: its grid, and runs that end once they have been steady for long enough, on all ranks."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from cs336_systems.config import resolve_size
from cs336_systems.distributed.process_group import joined
from cs336_systems.experiments.block_measure import with_float8
from cs336_systems.experiments.training import TRAINING_TABLE, Options, make_cells, rates_figure
from cs336_systems.experiments.training_measure import measure
from cs336_systems.harness.record import read_rows
from cs336_systems.pretraining.peer import peer_model
from tests.distributed.checks import on_ranks
from tests.report.rows import rows_of

CPU = replace(Options.default("cpu"), world_size=(1,))
GPU = replace(Options.default("cuda"), world_size=(1,))


def test_what_others_do_not_have_is_asked_of_ours_alone():
    several = replace(GPU, kernels=("reference", "fused"), keep=("products", "all"))
    cells = make_cells(replace(several, world_size=(1, 2), zero=(1,)))
    assert [cell.how for cell in cells] == ["ours"] * 8 + ["transformers", "transformers-liger"]
    assert {(cell.world_size, cell.kernels) for cell in cells[8:]} == {(1, "")}
    options = cells[-3].train_options
    assert (options.kernels, options.keep, options.zero) == ("fused", "all", 1)
    assert options.micro_batches(2) == 8
    recipes = make_cells(replace(GPU, recipe=("stored", "e4m3-row", "e4m3-e5m2")))
    assert [cell.recipe for cell in recipes] == ["stored", "e4m3-row", "e4m3-e5m2", "stored", "stored"]
    asked = [(o.matmul_dtype, o.gradient_dtype, o.scaling) for o in (cell.train_options for cell in recipes[:3])]
    assert asked == [("same", "e4m3", "tensor"), ("e4m3", "e4m3", "row"), ("e4m3", "e5m2", "tensor")]


def test_one_rank_runs_once_and_ways_to_gather_differ_where_weights_are_gathered():
    asked = replace(GPU, how=("ours",), world_size=(1, 2), zero=(1, 3), gather_by=("collectives", "copies"))
    cells = make_cells(asked)
    found = [(cell.world_size, cell.zero, cell.gather_by) for cell in cells]
    assert found == [(1, 0, "collectives"), (2, 1, "collectives"), (2, 3, "collectives"), (2, 3, "copies")]
    assert [cell.train_options.gather_by for cell in cells] == [cell.gather_by for cell in cells]
    assert len({str(cell) for cell in cells}) == 4


def test_independent_replicas_train_as_the_one_that_they_are_beside():
    asked = replace(GPU, how=("ours", "transformers"), world_size=(1, 2), zero=(1, 3), apart=("on", "off"))
    alone, apart, *together, peer = make_cells(replace(asked, gather_by=("copies",)))
    assert replace(apart, world_size=1, apart="off") == alone
    assert apart.train_options.micro_batches(1) == together[0].train_options.micro_batches(2) == 8
    assert replace(apart.train_options, total_batch_tokens=apart.total_batch_tokens) == alone.train_options
    assert [(cell.world_size, cell.zero, cell.apart) for cell in together] == [(2, 1, "off"), (2, 3, "off")]
    assert (peer.world_size, peer.apart) == (1, "off")


def test_conversations_and_adapters_are_asked_of_ours_and_trl_always_packs():
    asked = replace(GPU, how=("ours", "transformers", "trl", "input-gradients"), size=("qwen2.5-7b",), batch_size=1)
    asked = replace(asked, attention=("flash",), cuda_graph=("off",))
    cells = make_cells(replace(asked, conversations=("off", "packed"), lora_rank=(16,)))
    found = [(cell.how, cell.conversations, cell.lora_rank, cell.train_options.packing) for cell in cells]
    assert found == [
        *(("ours", "off", 16, False), ("ours", "packed", 16, True)),
        *(("transformers", "off", 0, False), ("trl", "packed", 0, False)),
        *(("input-gradients", "off", 0, False), ("input-gradients", "packed", 0, True)),
    ]
    assert len({str(cell) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        ({"size": ("tinny",)}, "'tinny'"),
        ({"attention": ("flashh",)}, "'flash'"),
        ({"keep": ("everything",)}, "everything"),
        ({"total_batch_tokens": 1000}, "1,000"),
        ({"world_size": (3,), "apart": ("on",)}, "1,536"),
        ({"apart": ("on",)}, "--apart on .* 1"),
        ({"kernels": ("fused",), "keep": ("autograd",)}, "fused"),
        ({"recipe": ("e4m3",)}, "keep autograd"),
    ],
)
def test_a_run_that_cannot_be_is_refused(fault, value):
    with pytest.raises(ValueError, match=value):
        make_cells(replace(CPU, **fault))


def measure_all(rank, cells):
    return [measure(cell, rank) for cell in cells]


@pytest.mark.slow
def test_runs_end_once_they_have_been_steady_for_long_enough():
    pytest.importorskip("transformers")
    few = replace(CPU, seconds=0.2, warmup=2, total_batch_tokens=512, context_length=32, keep=("products",))
    one, *two = make_cells(replace(few, world_size=(1, 2), zero=(3,), apart=("off", "on")))
    cells = [one, *make_cells(replace(few, recipe=("e4m3",), how=("ours", "transformers"))), *two]
    with joined("cpu") as rank:
        measured = measure_all(rank, cells[:3])
    measured += on_ranks(measure_all, 2, two)[0]
    found = [{metric.name: metric.samples for metric in metrics} for metrics in measured]
    for samples in found:
        assert len(samples["step"]) == len(samples["tokens_per_s"]) >= 1
        for ms, rate in zip(samples["step"], samples["tokens_per_s"], strict=True):
            assert ms * rate == pytest.approx(1000 * 512)
    of_ranks = found[4]["step_of_ranks"]
    assert len(of_ranks) == 2 and max(of_ranks) == pytest.approx(median(found[4]["step"]))
    rows = rows_of(cells, measured)
    rates = list(rows[rows["metric"] == "tokens_per_s"]["median"])
    frame = TRAINING_TABLE.of(rows).frame
    assert list(frame["x one rank"]) == ["–"] * 3 + [f"{rate / rates[0]:.3f}" for rate in rates[3:]]
    assert list(frame["x"]) == ["–", f"{rates[1] / rates[0]:.3f}", *["–"] * 3]
    assert rates_figure(rows, {}) is not None


@pytest.mark.slow
def test_useful_tokens_are_those_of_conversations_and_nothing_is_trained_for_the_bound_of_adapters():
    few = replace(CPU, seconds=0.1, warmup=1, total_batch_tokens=256, context_length=64, keep=("products",))
    cells = make_cells(replace(few, conversations=("off", "packed", "padded")))
    cells += make_cells(replace(few, how=("ours", "input-gradients"), lora_rank=(4,)))
    with joined("cpu") as rank:
        measured = measure_all(rank, cells)
    found = [{metric.name: metric.samples for metric in metrics} for metrics in measured]
    useful = [samples["useful_tokens_per_s"][0] / samples["tokens_per_s"][0] for samples in found]
    assert useful[0] == useful[3] == useful[4] == 1 and 0.9 < useful[1] <= 1 and 0.3 < useful[2] < 0.5
    targets = [samples["targets_per_s"][0] / samples["useful_tokens_per_s"][0] for samples in found]
    assert targets[1] == pytest.approx(targets[2]) and 0.66 < targets[1] < 0.72  # two thirds, and rounding
    assert found[4]["loss"][0] == pytest.approx(found[3]["loss"][0], rel=1e-3)  # after one small step of adapters
    frame = TRAINING_TABLE.of(rows_of(cells, measured)).frame
    shown = frame["x pre-training"].tolist()
    assert shown[0] == shown[3] == shown[4] == "–" and "–" not in shown[1:3]
    assert frame["x input gradients"][:3].tolist() == ["–"] * 3 and frame["x input gradients"][3] != "–"


def test_memory_of_a_tiny_model_is_not_shown_as_none():
    [cell] = make_cells(CPU)
    measured = {"step": 98.7, "tokens_per_s": 10_380.0, "peak_memory": 0.04249, "predicted_peak_memory": 12.34}
    frame = TRAINING_TABLE.of(rows_of([cell], [measured])).frame
    assert (frame["peak GiB"][0], frame["predicted GiB"][0]) == ("0.0425", "12.3")


def test_a_line_is_compared_with_the_fastest_of_its_own_command():
    """Of the committed rows, where two commands measured the same at other batch sizes."""
    rows = read_rows(Path(__file__).parents[2] / "profiles/results/h200/finetuning/benchmark_training.csv")
    frame = TRAINING_TABLE.of(rows[rows["size"] == "qwen2.5-0.5b"]).frame
    assert frame["how"].tolist() == ["ours", "ours", "trl-flash", "trl-flash-compiled"] * 2
    useful = [float(text.replace(",", "")) for text in frame["useful_tokens/s"].replace("–", "nan")]
    expected = {1: useful[1] / max(useful[2:4]), 5: useful[5] / max(useful[6:8])}
    assert {row: float(text) for row, text in frame["x TRL"].items() if text != "–"} == pytest.approx(
        expected, abs=1e-3
    )
    pre_training = [float(text.replace(",", "")) for text in frame["tokens/s"]]
    expected = {row: useful[row] / pre_training[row // 4 * 4] for row in (1, 2, 3, 5, 6, 7)}
    found = {row: float(text) for row, text in frame["x pre-training"].items() if text != "–"}
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_equal_blocks_share_a_graph(recipe):
    pytest.importorskip("transformers")
    if recipe:
        pytest.importorskip("torchao.float8")
    torch.compiler.reset()
    config = replace(resolve_size("tiny").at_context(16), n_layers=10)  # more than dynamo compiles of one function
    model = peer_model(config, torch.device("cpu"), torch.float32, liger=False)
    for block in model.blocks if recipe else ():
        with_float8(block, recipe)
    ids = torch.randint(config.vocab_size, (2, 16))
    expected = model(ids, ids)
    graphs = []
    model.compile_parts(backend=lambda graph, examples: graphs.append(graph) or graph)
    assert torch.equal(model(ids, ids), expected)
    assert len(graphs) == 3  # a block, the last norm, the loss


@pytest.mark.slow
def test_torchao_trains_the_same_model_on_the_same_tokens():
    pytest.importorskip("transformers")
    pytest.importorskip("torchao.float8")
    hows = ("transformers", "torchao-tensorwise")
    few = replace(CPU, how=hows, seconds=0.1, warmup=1, context_length=32, total_batch_tokens=256)
    with joined("cpu") as rank:
        stored, quantized = ({m.name: m.samples for m in measure(cell, rank)}["loss"] for cell in make_cells(few))
    assert 0 < max(abs(a / b - 1) for a, b in zip(quantized, stored, strict=False)) < 0.01
