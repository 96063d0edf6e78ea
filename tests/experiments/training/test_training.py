"""``benchmark_training.py``: its grid, and runs that end once they have been steady for long enough, on all ranks."""

from dataclasses import replace

import pytest

from cs336_systems.experiments.training.cells import Options, make_cells
from cs336_systems.experiments.training.experiment import EXPERIMENT
from cs336_systems.experiments.training.measure import measure
from cs336_systems.harness.sweep import run_sweep

CPU = replace(Options.default("cpu"), world_size=(1,))


def test_what_others_do_not_have_is_asked_of_ours_alone():
    several = replace(Options(), kernels=("fused", "fused-products"), keep=("products", "all"), lmhead_chunks=4)
    cells = make_cells(replace(several, world_size=(1, 2), zero=(1,)))
    assert [cell.how for cell in cells] == ["ours"] * 8 + ["transformers", "transformers-liger"]
    assert {(cell.world_size, cell.kernels, cell.lmhead_chunks) for cell in cells[8:]} == {(1, "", None)}
    options = cells[-3].train_options
    assert (options.kernels, options.keep, options.lmhead_chunks, options.zero) == ("fused-products", "all", 4, 1)
    assert options.micro_batches(2) == 8
    assert str(cells[-3]).endswith("ours fused-products all hopper CUDA graph on 2 ranks, ZeRO 1")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"seconds": 0.0}, "--seconds must be positive and finite, got 0"),
        ({"attention": ("flush",)}, "flush"),
        ({"total_batch_tokens": 1000}, "--total-batch-tokens 1,000 is no multiple of 512"),
        ({"world_size": (3,)}, "--total-batch-tokens 1,024 is no multiple of 1,536"),
        ({"kernels": ("fused",), "keep": ("autograd",)}, "fused"),
    ],
)
def test_a_run_that_cannot_be_is_refused(fault, message):
    with pytest.raises(ValueError, match=message):
        make_cells(replace(CPU, **fault))


@pytest.mark.slow
def test_runs_end_once_they_have_been_steady_for_long_enough():
    pytest.importorskip("transformers")
    hows = ("ours", "transformers", "transformers-liger")
    asked = replace(CPU, world_size=(1, 2), zero=(1,), how=hows, seconds=0.5, warmup=2)
    alone, two, peer, other = run_sweep(EXPERIMENT.name, make_cells(asked), measure, row_file=None, timeout_s=120)
    assert peer.status == "ok", peer.message
    for outcome in (alone, two):
        assert outcome.status == "ok", outcome.message
        found = {metric.name: metric.samples for metric in outcome.metrics}
        assert len(found["step"]) == len(found["tokens_per_s"]) >= 4
        each = zip(found["step"], found["tokens_per_s"], strict=True)
        assert all(ms * rate == pytest.approx(1000 * 1024) for ms, rate in each)
    assert (other.status, other.message) == ("unsupported", "Liger's kernels need a GPU, got cpu")
