"""Blocks' benchmark: its grid, refusals, ways on the CPU, its figure, and what a GPU keeps beside the prediction."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from cs336_systems.config import PRECISIONS
from cs336_systems.costs.kept import LEVELS, bytes_kept
from cs336_systems.experiments.block_measure import bench, measure_block
from cs336_systems.experiments.blocks import BlockCell, Options, kept_figure, make_cells
from cs336_systems.harness.record import Metric, parse_samples
from tests.benchmarks.commands import cells_of
from tests.report.rows import make_cell, ms

TINY = BlockCell("cpu", "tiny", 2, 32, "fp32", "reference", 2, "products", 1, 2, 0, 0)


def test_ways_are_interleaved_at_each_shape_and_written_out_ones_need_their_attention():
    options = Options(how=("compiled", "products"), attention=("sdpa-cudnn", "hopper"), repeat=2)
    cells = make_cells(options)
    turns = [(0, "compiled"), (0, "products"), (1, "products"), (1, "compiled")]
    assert [(cell.attention, cell.repeat, cell.how) for cell in cells] == [
        *(("sdpa-cudnn", repeat, "compiled") for repeat in range(2)),
        *(("hopper", *turn) for turn in turns),
    ]
    assert len({cell.subject for cell in cells}) == 2


def test_bad_values_are_named():
    for arguments, message in (
        ("--how produce", "--how produce is neither eager nor compiled: unknown level 'produce'"),
        ("--attention sdpa-cudnn --how all", "--attention sdpa-cudnn: a written-out block has reference"),
    ):
        with pytest.raises(ValueError, match=message):
            cells_of("blocks", *arguments.split())


def test_all_ways_have_the_same_weights_data_and_flops():
    shared = bench(TINY.subject)
    assert bench(replace(TINY, how="eager", repeat=3).subject) is shared
    d, f, tokens = 64, 192, 2 * 32
    flops = 2 * 3 * tokens * (2 * (4 * d * d + 3 * d * f) + 2 * 32 * d)
    for how in ("eager", *LEVELS):
        found = {metric.name: metric.samples for metric in measure_block(replace(TINY, how=how))}
        assert max(found[name][0] for name in ("error_out", "error_dx", "error_dweight")) < 2e-6
        assert found["model_tflops"] == pytest.approx([flops / ms / 1e9 for ms in found["step"]])
        if how != "eager":
            predicted = bytes_kept(TINY.config, 2, 32, PRECISIONS["fp32"], how)
            assert found["kept_predicted"] == [pytest.approx(predicted / 2**30)]


SHAPE = {"size": "llama3-8b", "batch_size": 2, "context_length": 8192, "dtype": "bf16", "attention": "hopper"}


def cell(how, step, kept, **values):
    settings = SHAPE | {"gpu": "NVIDIA H200", "device": "cuda", "layers": 1, "repeat": 0, "commit": "abc"} | values
    return make_cell(ms("step", step), Metric("kept", "GiB", [kept]), how=how, **settings)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def test_a_point_for_each_way_and_time_by_block():
    rows = frame(
        cell("compiled", 42.0, 4.0),
        cell("products", 40.0, 2.5),
        cell("input", 50.0, 0.5),
        cell("compiled", 41.0, 4.0, attention="sdpa-cudnn"),
        cell("compiled", 240.0, 4.0, size="leaderboard-8b", layers=6),
    )
    llama, leaderboard = kept_figure(rows).axes
    points = [list(zip(*bars[0].get_data(), strict=True)) for bars in llama.containers]
    assert points == [[(0.5, 50.0), (2.5, 40.0)], [(4.0, 42.0)]]
    assert {text.get_text() for text in llama.texts} == {"compiled", "products", "input"}
    assert list(leaderboard.containers[0][0].get_ydata()) == [40.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", [*LEVELS, "all-norm", "products-residual"])
def test_a_gpu_keeps_what_is_predicted(how):
    # Tensors so large that the allocator's blocks are hardly larger.
    cell = BlockCell("cuda", "small", 16, 1024, "bf16", "flash", 2, how, 1, 2, 0, 0)
    found = {metric.name: metric.samples[0] for metric in measure_block(cell)}
    assert found["kept"] == pytest.approx(found["kept_predicted"], rel=0.01)
    assert found["error_out"] < 0.02 and found["error_dx"] < 0.02 and found["error_dweight"] < 0.04
