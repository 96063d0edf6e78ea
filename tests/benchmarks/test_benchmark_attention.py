"""The attention benchmark's command: its grids, its refusals, and a small run on the CPU."""

import json

import pytest

from cs336_systems.config import ATTENTIONS
from cs336_systems.experiments.attention import VARIANTS, Options, make_cells
from cs336_systems.harness.record import read_rows
from tests.benchmarks.commands import cells_of, run


def test_every_grid_has_the_cells_of_its_shapes():
    def made(grid, **options):
        return make_cells(Options(device="cuda", grid=(grid,), **options))

    flash = made("flash")
    assert len(flash) == len(ATTENTIONS) * 2 * 4 * 10
    assert {cell.length for cell in flash} == {2**power for power in range(7, 17)}
    assert all(cell.causal and cell.batch_size == 1 and not cell.heads for cell in flash)
    pytorch = made("pytorch", length=(256, 1024, 4096, 8192, 16384))
    assert {(cell.batch_size, cell.d_head, cell.length) for cell in pytorch} == {
        (8, d, length) for d in (16, 32, 64, 128) for length in (256, 1024, 4096, 8192, 16384)
    }
    variants = made("variants")
    assert {(cell.impl, cell.mask) for cell in variants} == {
        (impl, mask) for impl in ("flex", "sdpa-dense-mask") for mask in VARIANTS
    }
    training = made("training", length=(2048,), impl=("flash",), autotune=True)
    assert [(cell.impl, cell.autotune, cell.heads) for cell in training] == [("flash", True, 16)]
    assert not any(cell.autotune for cell in made("flash", impl=("reference",), autotune=True))


def test_clocks_follow_each_other_and_the_harness_is_the_default():
    assert {cell.clock for cell in make_cells(Options(device="cuda"))} == {"harness"}
    cells = make_cells(Options(device="cuda", grid=("flash",), impl=("flash",), clock=("harness", "do-bench")))
    assert [cell.clock for cell in cells[:4]] == ["harness", "do-bench"] * 2
    assert str(cells[1]) == f"{cells[0]} by do-bench"
    assert len({cell.length for cell in cells[:4]}) == 2


def test_repeats_take_turns():
    arguments = ("--grid", "flash", "--dtype", "fp32", "--repeat", "2")
    cells = cells_of("attention", *arguments, "--impl", "tiled", "reference")
    assert [(cell.repeat, cell.length, cell.impl) for cell in cells] == [
        (repeat, length, impl)
        for repeat, impls in enumerate((("tiled", "reference"), ("reference", "tiled")))
        for length in (256, 1024)
        for impl in impls
    ]
    assert cells_of("attention", *arguments, "--attention", "tiled", "reference") == cells


def test_a_bare_command_on_a_cpu_is_short_and_compiles_nothing():
    cells = cells_of("attention")
    assert {(cell.d_head, cell.length) for cell in cells} == {(64, 256), (64, 1024)}
    assert {cell.impl for cell in cells} == set(ATTENTIONS) - {"reference-compiled"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--impl", "falsh"], "--impl falsh: known are reference, .*sdpa-dense-mask"),
        (
            ["--clock", "harness", "do-bench"],
            "--clock do-bench: triton's do_bench times CUDA devices, got --device cpu",
        ),
        (["--repeat", "3", "--autotune"], "--autotune searches once, got --repeat 3"),
        (["--length", "77"], "no cell of --grid pytorch flash has the values asked for, with lengths 77"),
        (["--grid", "variants", "--impl", "flash"], "no cell of --grid variants .*longer ones"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cells_of("attention", *arguments)


@pytest.mark.slow
def test_a_small_run_on_a_cpu(tmp_path, capsys):
    cells = ["--grid", "flash", "--impl", "reference", "tiled", "sdpa-flash", "flash", "--length", "256"]
    shape = ["--d-head", "16", "--dtype", "fp32"]
    code, out, _ = run("benchmark_attention", capsys, *cells, *shape, "--out", tmp_path, "--format", "csv")
    assert code == 0
    last = json.loads(out.strip().splitlines()[-1])
    assert [cell["status"] for cell in last["cells"]] == ["ok", "ok", "ok", "unsupported"]
    rows = read_rows(tmp_path / "benchmark_attention.csv")
    errors = rows[rows["metric"].str.startswith("error_")]
    assert len(errors) == 3 * 4
    assert errors["median"].max() < 2e-6
    assert "flash is compiled for CUDA devices" in rows[rows["impl"] == "flash"]["message"].iloc[0]
    assert (rows[rows["metric"] == "both"]["n"] >= 10).all()
