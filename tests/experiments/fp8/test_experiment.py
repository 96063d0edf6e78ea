"""``benchmark_fp8``: its grid, and its rows on a CPU, where products are emulated."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.experiments.fp8.cells import Options, make_cells, product_shape
from cs336_systems.experiments.fp8.experiment import EXPERIMENT
from cs336_systems.experiments.fp8.measure import measure
from cs336_systems.harness.record import read_rows

TINY = replace(Options.default("cpu"), context_length=(16,), steps=1)


def test_ways_take_turns_at_each_shape():
    options = replace(TINY, product=("qkv", "down"), how=("stored", "e4m3"), repeat=2)
    kinds = [(cell.part, cell.product, cell.repeat, cell.how) for cell in make_cells(options)]
    turns = [(0, "stored"), (0, "e4m3"), (1, "e4m3"), (1, "stored")]
    shapes = [("product", "qkv"), ("product", "down"), ("block", "")]
    assert kinds == [(*shape, *turn) for shape in shapes for turn in turns]


def test_products_are_those_of_a_block():
    config = make_cells(TINY)[0].config
    elements = sum(n * k for n, k in (product_shape(config, name) for name in ("qkv", "output", "gate_up", "down")))
    assert elements == config.n_block_parameters - 2 * config.d_model


def test_sizes_that_fp8_does_not_take_are_refused():
    with pytest.raises(ValueError, match="--how e4m3: products in fp8 take sizes that 16 divides, .* has 15"):
        make_cells(replace(TINY, context_length=(15,)))
    assert make_cells(replace(TINY, context_length=(15,), how=("stored",)))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"attention": "hopper"}, "--attention hopper needs --device cuda, got cpu"),
        ({"part": ("block",), "product": ("qkv",)}, "--product qkv is of --part product, which is not asked for"),
    ],
)
def test_what_cannot_be_asked_is_told(fault, message):
    with pytest.raises(ValueError, match=message):
        make_cells(replace(TINY, **fault))


def test_rows_hold_times_and_cosines(tmp_path, capsys):
    options = replace(TINY, product=("output",), how=("stored", "e4m3"), out=tmp_path)
    assert EXPERIMENT.run(options) == 0
    rows = read_rows(tmp_path / "benchmark_fp8.csv")
    assert (rows["status"] == "ok").all()
    phases = set(rows[(rows["part"] == "product") & (rows["how"] == "e4m3")]["metric"])
    assert {"quantize_x", "forward", "quantize_dy", "backward", "step", "tflops", "product_tflops"} <= phases
    assert {"weight_gradient", "accumulate"} <= phases
    least = rows[rows["metric"] == "least_cosine"].set_index("how")["median"]
    assert 1 + 1e-12 >= least["stored"] > 0.999999
    assert 0.98 <= least["e4m3"] < 0.999999
    assert "least cosine" in capsys.readouterr().out


def test_a_block_is_compiled_for_one_shape(monkeypatch):
    shapes = []

    def compile_once(block, **how):
        def call(x, *rotary):
            shapes.append(tuple(x.shape))
            return block(x, *rotary)

        return call

    monkeypatch.setattr(torch, "compile", compile_once)
    (cell,) = make_cells(replace(TINY, part=("block",), how=("compiled",), batch_size=(2,)))
    metrics = {metric.name: metric.samples for metric in measure(cell)}
    assert set(shapes) == {(2, 16, cell.config.d_model)}
    assert min(metrics["least_cosine"]) > 0.999999
