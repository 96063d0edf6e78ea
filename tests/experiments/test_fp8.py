"""``benchmark_fp8``: its grid, ways on a CPU, where matmuls are emulated, its figure, and torchao's layers."""

from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from torch import nn

from cs336_systems.experiments.block_measure import measure_fp8, with_float8
from cs336_systems.experiments.fp8 import EXPERIMENT, Options, make_cells, time_figure
from cs336_systems.harness.record import parse_samples
from cs336_systems.harness.sweep import Outcome
from tests.report.rows import make_cell, ms

TINY = replace(Options.default("cpu"), context_length=(16,), steps=1)


def test_what_cannot_be_asked_is_told():
    for fault, message in (
        ({"context_length": (15,)}, "--how e4m3: .* has 15"),
        ({"attention": "hopper"}, "--attention hopper needs --device cuda, got cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            make_cells(replace(TINY, **fault))


def test_gradients_of_quantized_blocks_point_where_exact_ones_do():
    for cell in make_cells(replace(TINY, how=("stored", "e4m3"))):
        found = {metric.name: metric.samples for metric in measure_fp8(cell)}
        assert found["step"] == pytest.approx([sum(ms) for ms in zip(found["forward"], found["backward"], strict=True)])
        if cell.how == "stored":
            assert 1 + 1e-12 >= found["least_cosine"][0] > 0.999999
        else:
            assert 0.98 <= found["least_cosine"][0] < 0.999999


SHAPE = {"size": "llama3-8b", "batch_size": 2, "context_length": 8192, "device": "cuda", "gpu": "NVIDIA H200"}


def cell(how, **phases):
    return make_cell(*(ms(name, value) for name, value in phases.items()), part="block", how=how, **SHAPE)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def test_backward_stands_behind_forward_in_the_bar_of_its_way():
    rows = frame(cell("e4m3", forward=1.0, backward=2.0), cell("compiled", forward=2.0, backward=4.0))
    (axes,) = time_figure(rows).axes
    assert axes.get_title() == "llama3-8b, 2 x 8192 tokens"
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1), (0, 2), (1, 2), (2, 4)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_layers_are_replaced_in_place_and_products_quantized(recipe):
    pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 64), torch.randn(16, 32)
    expected = layer(x)
    block = nn.Sequential(layer, nn.Embedding(16, 16))
    assert with_float8(block, recipe) is block
    assert block[0].weight is layer.weight and block[0].bias is layer.bias
    assert type(block[1]) is nn.Embedding
    found = block[0](x)
    off = (found - expected).norm() / expected.norm()
    assert 2**-9 < off < 2**-3  # e4m3 rounds an element by up to 2^-4
    found.sum().backward()
    assert layer.weight.grad is not None


def test_a_table_stands_beside_what_its_times_suffered_from(monkeypatch, capsys):
    def sweep(benchmark, cells, *arguments, **options):
        where = {"host": "a CPU, 2 cores", "state_before": f'{{"load_1min": {load}}}'}
        yield from (Outcome(cell, "ok", rows=make_cell(ms("step", 1.0), **asdict(cell), **where)) for cell in cells)

    monkeypatch.setattr("cs336_systems.harness.sweep.run_sweep", sweep)
    for load in (7.5, 2.5):
        assert EXPERIMENT.run(replace(TINY, how=("stored",))) == 0
        out = capsys.readouterr().out
        assert "A CPU emulates fp8" in out
        assert ("The machine was loaded, 7.5 processes on 2 cores" in out) == (load == 7.5), "2.5 may be its own"
