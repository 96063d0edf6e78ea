"""Blocks' benchmark: its refusals, ways on the CPU, and what a GPU keeps beside the prediction."""

from dataclasses import replace

import pytest

from cs336_systems.config import PRECISIONS
from cs336_systems.costs.kept import LEVELS, bytes_kept
from cs336_systems.experiments.block_measure import bench, measure_block
from cs336_systems.experiments.blocks import BlockCell
from tests.benchmarks.commands import cells_of

TINY = BlockCell("cpu", "tiny", 2, 32, "fp32", "reference", 2, "products", 1, 2, 0, 0)


def test_bad_values_are_named():
    for arguments, message in (
        ("--how produce", "--how produce is neither eager nor compiled: unknown level 'produce'"),
        ("--attention sdpa-cudnn --how all", "--attention sdpa-cudnn: a written-out block has reference"),
    ):
        with pytest.raises(ValueError, match=message):
            cells_of("blocks", *arguments.split())


@pytest.mark.slow
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


@pytest.mark.gpu
@pytest.mark.parametrize("how", [*LEVELS, "all-norm", "products-residual"])
def test_a_gpu_keeps_what_is_predicted(how):
    # Tensors so large that the allocator's blocks are hardly larger.
    cell = BlockCell("cuda", "small", 16, 1024, "bf16", "flash", 2, how, 1, 2, 0, 0)
    found = {metric.name: metric.samples[0] for metric in measure_block(cell)}
    assert found["kept"] == pytest.approx(found["kept_predicted"], rel=0.01)
    assert found["error_out"] < 0.02 and found["error_dx"] < 0.02 and found["error_dweight"] < 0.04
