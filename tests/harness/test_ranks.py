"""Ranks measured together: the slowest decides; and every way in which a cell of several ranks can end."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems import processes
from cs336_systems.distributed.spawn import RankFailed, spawn
from cs336_systems.harness import ranks
from cs336_systems.harness.ranks import reports, resolve_world_sizes
from cs336_systems.harness.record import RowFile, read_rows
from cs336_systems.harness.sweep import cell_columns, run_sweep
from cs336_systems.processes import Died
from tests.harness.cells import SKEW_S, RankedCell, disagree, measure

ROOT = Path(__file__).resolve().parents[2]


def sweep(whats, timeout_s=60.0, row_file=None, world_size=2, folder="", expected_s=None):
    cells = [RankedCell(what, str(folder), world_size=world_size) for what in whats]
    options = {"timeout_s": timeout_s, "expected_s": expected_s}
    return list(run_sweep("bench", cells, measure, row_file=row_file, **options))


@pytest.mark.slow
def test_cells_in_ranks_of_their_own_end_as_rows(tmp_path, capfd):
    whats = ["ok", "unsupported", "MemoryError on rank 1", "SIGKILL on rank 1", "ok"]
    csv = tmp_path / "rows.csv"
    outcomes = sweep(whats, row_file=RowFile(csv, cell_columns(RankedCell)))
    assert [(outcome.status, outcome.message) for outcome in outcomes] == [
        ("ok", ""),
        ("unsupported", "no tensor cores here"),
        ("oom", "MemoryError: a list too long"),
        ("error", "rank 1 died without a report: SIGKILL"),
        ("ok", ""),
    ]
    first, last = outcomes[0], outcomes[-1]
    assert first.median("sum_of_ones") == 2.0**5
    assert first.median("skewed") >= 2 * SKEW_S * 1e3
    assert first.median("step") >= first.median("skewed")
    assert first.median("pid") != last.median("pid")
    assert {metric.name: len(metric.samples) for metric in first.metrics}["warmup_step"] == 2
    rows = read_rows(csv)
    assert list(rows["status"].unique()) == ["ok", "unsupported", "oom", "error"]
    assert (rows["host"] != "").all()
    assert (rows["state_before"] != "{}").all()  # told before the cell began, also by a rank of one that died
    assert (rows["world_size"] == 2).all()
    assert "[3/5] MemoryError on rank 1: oom: MemoryError: a list too long" in capfd.readouterr().err


def test_where_a_cell_ran_is_known_though_a_rank_died_before_rank_0_could_tell(monkeypatch):
    def spawn_whose_rank_1_dies_first(*arguments, hear, **options):
        hear(1, {"state_before": {"load_1min": 1.0}, "provenance": {"host": "here"}})
        raise RankFailed(1, "rank 1 died") from Died("died")

    monkeypatch.setattr(ranks, "spawn", spawn_whose_rank_1_dies_first)
    report = {}
    ranks.measure_on_ranks(measure, RankedCell("SIGKILL on rank 1"), 60.0, report)
    assert report == {
        "state_before": {"load_1min": 1.0},
        "provenance": {"host": "here"},
        "status": "error",
        "message": "rank 1 died",
    }


def test_a_rank_that_the_kernel_killed_for_memory_is_oom(monkeypatch):
    counter = itertools.count()
    monkeypatch.setattr(processes, "_oom_kills", lambda: next(counter))
    [outcome] = sweep(["SIGKILL on rank 1"])
    assert (outcome.status, outcome.message) == ("oom", "rank 1 killed by the kernel's out-of-memory killer")


def test_a_cell_that_hangs_is_killed(tmp_path):
    [outcome] = sweep(["sleep on rank 1"], timeout_s=1.5, folder=tmp_path)
    assert (outcome.status, outcome.metrics) == ("timeout", [])
    assert outcome.message == "took longer than 1.5 s and was killed"


def test_ranks_that_would_time_different_numbers_of_steps_hear_of_it():
    assert (
        spawn(disagree, 2, timeout_s=60)
        == ["phases and step counts differ across ranks at index 3: rank 0 has 1, rank 1 has 2"] * 2
    )


@pytest.mark.slow
def test_under_a_launcher_failed_cells_are_rows_and_the_rest_still_runs(tmp_path):
    cells = ["ok@2", "MemoryError on rank 1@2", "unsupported@2", "late@2", "alone@2", "ok@3", "ok@2", "stuck@2", "ok@2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.harness.sweep_script", str(tmp_path), *cells]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    rows = read_rows(tmp_path / "rows.csv").drop_duplicates(["what", "world_size", "timestamp", "status"])
    cells = (f"{what}@{world_size}" for what, world_size in zip(rows["what"], rows["world_size"], strict=True))
    told = dict(zip(cells, zip(rows["status"], rows["message"], strict=True), strict=True))
    assert told == {
        "ok@2": ("ok", ""),
        "MemoryError on rank 1@2": ("oom", "rank 1: MemoryError: a list too long"),
        "unsupported@2": ("unsupported", "rank 0: no tensor cores here"),
        "late@2": ("error", "rank 1: ArithmeticError: too late for the others to notice"),
        "alone@2": ("error", "rank 1: ArithmeticError: nobody is here"),
        "ok@3": ("unsupported", "takes 3 ranks, the launcher has started 2"),
        "stuck@2": (
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


@pytest.mark.parametrize("expected_s", [None, lambda cell: 500.0])
def test_on_a_terminal_there_is_a_bar_and_an_estimate_if_cells_say_what_they_take(expected_s, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for a terminal
    [outcome] = sweep(["ok"], world_size=1, expected_s=expected_s)
    shown = capsys.readouterr().err
    assert outcome.status == "ok"
    assert "━" in shown
    assert ("about 0:08" in shown) == (expected_s is not None)


def test_a_row_names_the_cells_own_columns():
    [outcome] = sweep(["ok"], world_size=1)
    assert json.loads(outcome.rows[0]["state_before"])
    assert (outcome.rows[0]["what"], outcome.rows[0]["variant"], outcome.rows[0]["seed"]) == ("ok", "test", 7)
    assert outcome.median("sum_of_ones") == 1.0
