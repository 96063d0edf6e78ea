"""The command in two real ranks; its grid under launchers and without; refusals."""

import json

import pytest
import torch

from cs336_systems.harness import sweep
from cs336_systems.harness.record import read_rows
from tests.benchmarks.commands import cells_of, run


@pytest.fixture
def launcher(monkeypatch):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_two_ranks_without_a_launcher(capsys, tmp_path):
    sizes = ["--size-mb", "0.01", "1", "--steps", "3", "--dtype", "bf16"]
    code, out, err = run(
        "benchmark_collectives", capsys, "--collective", "all_reduce", "all_gather", *sizes, "--out", str(tmp_path)
    )
    assert code == 0, err
    assert "On a CPU the defaults shrink: --calls 1, --warmup 1 (on a GPU 5, 5)." in err
    assert "Ring fitted to all times of a world: 2 ranks:" in out
    line = json.loads(out.splitlines()[-1])
    assert line["ok"] == 4
    assert line["cells"][0]["cell"] == "all_reduce 0.01 MB bf16 on 2 ranks (gloo)"
    assert all(cell["wrong_elements"] == 0 and cell["time_ms"] > 0 for cell in line["cells"])
    rows = read_rows(tmp_path / "benchmark_collectives.csv")
    assert set(rows["total_bytes"]) == {9984, 999936}
    times = rows[rows["metric"] == "time"]
    assert (times["n"] == 3).all()
    assert (tmp_path / "benchmark_collectives.png").exists()


@pytest.mark.slow
def test_wrong_elements_fail_the_command(monkeypatch, capsys):
    def wrong(*arguments, **options):
        [outcome] = real(*arguments, **options)
        for row in outcome.rows:
            if row["metric"] == "wrong_elements":
                row["median"] = 3.0
        return [outcome]

    real = sweep.run_sweep
    monkeypatch.setattr(sweep, "run_sweep", wrong)
    options = ["--collective", "all_reduce", "--size-mb", "0.01", "--steps", "1", "--world-size", "1"]
    code, _, err = run("benchmark_collectives", capsys, *options)
    assert code == 1
    assert "wrong elements in all_reduce 0.01 MB fp32 on 1 ranks (gloo)" in err


def test_the_grid_of_a_machine(monkeypatch):
    assert {cell.world_size for cell in cells_of("collectives")} == {2}
    assert len(cells_of("collectives", "--world-size", "2", "3")) == 2 * 5 * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cells = cells_of("collectives", device="cuda")
    assert {cell.world_size for cell in cells} == {2, 4}
    assert {cell.variant for cell in cells} == {"nccl"}
    assert all(cell.total_bytes % (cell.world_size * 128) == 0 for cell in cells)


def test_under_a_launcher_the_world_is_the_launchers(launcher):
    assert {cell.world_size for cell in cells_of("collectives")} == {3}
    with pytest.raises(ValueError, match="--world-size 2 4: the launcher has started 3 ranks"):
        cells_of("collectives", "--world-size", "2", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "--world-size must be positive, got 0"),
        (["--size-mb", "0.0001"], "--size-mb must lie between 0.000256 and 8000, got 0.0001"),
        (["--size-mb", "9000"], "got 9000"),
        (["--collective"], "--collective needs at least one value"),
    ],
)
def test_bad_input_is_one_sentence(capsys, arguments, message):
    code, out, err = run("benchmark_collectives", capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
