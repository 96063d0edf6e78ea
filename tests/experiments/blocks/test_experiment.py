"""Blocks' benchmark: its grid in turns, what it refuses, a run on the CPU, and what a GPU keeps beside the table."""

import json
from dataclasses import replace

import pytest
import torch

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.kept import LEVELS, bytes_kept
from cs336_systems.experiments.blocks.cells import BlockCell, Options, make_cells
from cs336_systems.experiments.blocks.measure import bench, errors, measure, step_flops
from cs336_systems.harness.record import read_rows
from tests.benchmarks.commands import cells_of, run

TINY = BlockCell("cpu", "tiny", 2, 32, "fp32", "reference", 2, "products", 1, 2, 0, 0)


def test_ways_take_turns_at_each_shape():
    options = Options(
        how=("compiled", "products"), size=("llama3-8b", "leaderboard-8b"), context_length=(8192,), repeat=2
    )
    assert [(cell.size, cell.repeat, cell.how) for cell in make_cells(options)] == [
        (size, repeat, how)
        for size in ("llama3-8b", "leaderboard-8b")
        for repeat, hows in enumerate((("compiled", "products"), ("products", "compiled")))
        for how in hows
    ]
    first, second = (cell.shape for cell in make_cells(replace(options, size=("llama3-8b",)))[:2])
    assert first == second


def test_attention_that_only_autograd_has_runs_in_reference_blocks():
    options = Options(how=("compiled", "products"), attention=("sdpa-cudnn", "hopper"), repeat=1)
    assert [(cell.attention, cell.how) for cell in make_cells(options)] == [
        *(("sdpa-cudnn", "compiled"), ("hopper", "compiled"), ("hopper", "products"))
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--how", "produce"), "--how produce is neither eager nor compiled: unknown level 'produce'.*'products'"),
        (("--how", "all-norms"), "unknown switch 'norms'.*did you mean 'norm'"),
        (("--attention", "magic"), "--attention magic: known are reference"),
        (
            ("--attention", "sdpa-cudnn", "--how", "all"),
            "--attention sdpa-cudnn: a written-out block has reference, flash",
        ),
        (("--size", "huge"), "unknown model size 'huge'"),
        (("--layers", "0"), "--layers must be positive, got 0"),
        (("--size", "llama3-8b", "--context-length", "8193"), "8193"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cells_of("blocks", *arguments)


@pytest.mark.slow
def test_a_cpu_measures_every_level_in_plain_pytorch(tmp_path, capsys):
    how = ["eager", *LEVELS]
    code, out, _ = run("benchmark_blocks", capsys, "--steps", "2", "--context-length", "16", "--out", tmp_path)
    assert code == 0
    assert [cell["status"] for cell in json.loads(out.splitlines()[-1])["cells"]] == ["ok"] * len(how)
    rows = read_rows(tmp_path / "benchmark_blocks.csv")
    assert list(rows["how"].unique()) == how
    assert (rows[rows["metric"].isin(("error_out", "error_dx", "error_dweight"))]["median"] < 2e-6).all()
    predicted = rows[rows["metric"] == "kept_predicted"].set_index("how")["median"] * 2**30
    config = MODEL_SIZES["tiny"].at_context(16)
    for level in LEVELS:
        assert predicted[level] == pytest.approx(bytes_kept(config, 1, 16, PRECISIONS["fp32"], level))


def test_all_ways_have_the_same_weights_and_data():
    shared = bench(TINY.shape)
    assert bench(replace(TINY, how="eager", repeat=3).shape) is shared
    assert len(shared.reference) == 2 and shared.x.shape == (2, 32, 64)
    cos, sin = shared.model.rotary(32)
    outs = [shared.blocks(replace(TINY, how=how))[1](shared.x, cos, sin) for how in ("eager", "input", "all")]
    assert torch.equal(outs[1], outs[2])
    torch.testing.assert_close(outs[0], outs[1])


def test_errors_are_of_the_output_its_inputs_gradient_and_the_worst_weight():
    ones = torch.ones(4, dtype=torch.float64)
    exact = dict.fromkeys(("out", "dx", "w1", "w2"), ones)
    got = {"out": ones, "dx": 1.5 * ones, "w1": ones, "w2": 3 * ones}
    found = {metric.name: metric.samples for metric in errors(got, exact)}
    assert found == {"error_out": [0.0], "error_dx": [0.5], "error_dweight": [2.0]}


def test_flops_are_those_of_the_blocks_alone():
    one, two = (step_flops(replace(TINY, layers=layers)) for layers in (1, 2))
    d, f, tokens = 64, 192, 2 * 32
    assert two == 2 * one == 2 * 3 * tokens * (2 * (4 * d * d + 3 * d * f) + 2 * 32 * d)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", [*LEVELS, "all-norm", "products-residual"])
def test_a_gpu_keeps_what_is_predicted(how):
    # Tensors so large that the allocator's blocks are hardly larger.
    cell = BlockCell("cuda", "small", 16, 1024, "bf16", "flash", 2, how, 1, 2, 0, 0)
    found = {metric.name: metric.samples[0] for metric in measure(cell)}
    assert found["kept"] == pytest.approx(found["kept_predicted"], rel=0.01)
    assert found["error_out"] < 0.02 and found["error_dx"] < 0.02 and found["error_dweight"] < 0.04
