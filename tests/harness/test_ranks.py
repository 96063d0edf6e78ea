"""Ranks measured together: the slowest decides; and every way in which a cell of several ranks can end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.distributed.process_group import spawn
from cs336_systems.harness.ranks import reports, resolve_world_sizes, run_ranked_sweep
from cs336_systems.harness.record import RowFile, read_rows
from cs336_systems.harness.sweep import cell_columns
from tests.harness.ranked_cells import SLEEP_S, Cell, disagree, measure

ROOT = Path(__file__).resolve().parents[2]


def sweep(whats, timeout_s=60.0, row_file=None, world_size=2):
    cells = [Cell(what, world_size) for what in whats]
    return run_ranked_sweep(
        "bench",
        cells,
        measure,
        device="cpu",
        row_file=row_file,
        timeout_s=timeout_s,
        describe=lambda cell: cell.what,
    )


def test_cells_in_ranks_of_their_own_end_as_rows(tmp_path, capfd):
    whats = ["ok", "raise everywhere", "raise on rank 1", "kill", "ok"]
    csv = tmp_path / "rows.csv"
    outcomes = sweep(whats, row_file=RowFile(csv, cell_columns(Cell)))
    assert [(outcome.status, outcome.message) for outcome in outcomes] == [
        ("ok", ""),
        ("unsupported", "no such thing anywhere"),
        ("oom", "MemoryError: not enough here"),
        ("error", "rank 1 died without a report: SIGKILL"),
        ("ok", ""),
    ]
    first, last = outcomes[0], outcomes[-1]
    assert first.median("sum_of_ones") == 2.0**5
    assert first.median("skewed") >= 2 * SLEEP_S * 1e3
    assert first.median("step") >= first.median("skewed")
    assert first.median("pid") != last.median("pid")
    assert {metric.name: len(metric.samples) for metric in first.metrics}["warmup_step"] == 2
    rows = read_rows(csv)
    assert list(rows["status"].unique()) == ["ok", "unsupported", "oom", "error"]
    assert (rows["host"] != "").all()
    assert (rows["world_size"] == 2).all()
    assert "[3/5] raise on rank 1: oom: MemoryError: not enough here" in capfd.readouterr().err


def test_a_cell_that_hangs_is_killed():
    [outcome] = sweep(["hang"], timeout_s=1.5)
    assert (outcome.status, outcome.metrics) == ("timeout", [])
    assert outcome.message == "took longer than 1.5 s and was killed"


def test_ranks_that_would_time_different_numbers_of_steps_hear_of_it():
    assert (
        spawn(disagree, 2, timeout_s=60)
        == ["phases and step counts differ across ranks at index 3: rank 0 has 1, rank 1 has 2"] * 2
    )


def test_under_a_launcher_failed_cells_are_rows_and_the_rest_still_runs(tmp_path):
    whats = ["ok", "raise on rank 1", "raise everywhere", "raise late on rank 1", "other world", "ok", "stuck", "ok"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.harness.ranked_cells", str(tmp_path), *whats]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    rows = read_rows(tmp_path / "rows.csv").drop_duplicates(["what", "timestamp", "status"])
    told = dict(zip(rows["what"], zip(rows["status"], rows["message"], strict=True), strict=True))
    assert told == {
        "ok": ("ok", ""),
        "raise on rank 1": ("oom", "rank 1: MemoryError: not enough here"),
        "raise everywhere": ("unsupported", "rank 0: no such thing anywhere"),
        "raise late on rank 1": ("error", "rank 1: ArithmeticError: too late for the others to notice"),
        "other world": ("unsupported", "takes 3 ranks, the launcher has started 2"),
        "stuck": (
            "error",
            "rank 1: ArithmeticError: nobody hears this; ranks 0 have not ended the cell, and the run ends here",
        ),
    }, done.stderr
    assert done.returncode == 1
    assert "RankFailed: rank 1: ArithmeticError: nobody hears this" in done.stderr.partition("Root Cause")[2]


def test_the_world_size_is_the_launchers_or_the_one_asked_for(monkeypatch):
    assert resolve_world_sizes(None, (2,)) == (2,)
    assert resolve_world_sizes((4, 1), (2,)) == (4, 1)
    assert reports()
    with pytest.raises(ValueError, match="--world-size must be positive, got 0"):
        resolve_world_sizes((1, 0), (2,))
    with pytest.raises(ValueError, match="--world-size needs at least one value"):
        resolve_world_sizes((), (2,))
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert resolve_world_sizes(None, (2,)) == resolve_world_sizes((3,), (2,)) == (3,)
    assert not reports()
    with pytest.raises(ValueError, match="--world-size 2: the launcher has started 3 ranks"):
        resolve_world_sizes((2,), (2,))


def test_a_row_names_the_cells_own_columns():
    [outcome] = sweep(["ok"], world_size=1)
    assert json.loads(outcome.rows[0]["state_before"])
    assert (outcome.rows[0]["what"], outcome.rows[0]["variant"], outcome.rows[0]["seed"]) == ("ok", "test", 7)
    assert outcome.median("sum_of_ones") == 1.0
