"""Every way in which a cell can end, in real processes, on ranks and under torchrun; interrupted and killed sweeps."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from cs336_systems import processes
from cs336_systems.harness import isolation, launcher
from cs336_systems.harness.record import RowFile, read_rows
from cs336_systems.harness.sweep import cell_columns, outcome_rows, run_sweep
from tests.harness.cells import SKEW_S, Cell, RankedCell, calls, measure

ROOT = Path(__file__).resolve().parents[2]
ALWAYS_KNOWN = ("host", "python", "torch", "commit", "argv", "seed", "timestamp", "state_before")
SCRIPT = ["-m", "tests.harness.sweep_script"]


def is_gone(pid, within_s=60.0):
    """Whether a process ends in time; one that only waits for its parent's notice has ended."""
    deadline = time.perf_counter() + within_s
    while time.perf_counter() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def wait_for_pids(folder, within_s):
    """What the ``sleep`` cell notes: its own process and the one that it started."""
    deadline = time.perf_counter() + within_s
    while not (folder / "pids.json").exists():
        assert time.perf_counter() < deadline, "the slow cell has not begun"
        time.sleep(0.02)
    return json.loads((folder / "pids.json").read_text())


def is_known(row):
    """Whether every provenance column that always applies is filled."""
    return all(str(row[column]) not in ("", "nan", "{}") for column in ALWAYS_KNOWN)


def sweep(*cells, folder=None, timeout_s=600.0, share=None):
    """The outcomes of cells, given as such or by what they do."""
    cells = [Cell(cell) if isinstance(cell, str) else cell for cell in cells]
    row_file = RowFile(folder / "rows.csv", cell_columns(type(cells[0]))) if folder else None
    options = {"timeout_s": timeout_s, "share": share}
    outcomes = list(run_sweep("bench", cells, measure, row_file=row_file, **options))
    for outcome in outcomes:
        assert all((row["status"], row["message"]) == (outcome.status, outcome.message) for row in outcome.rows)
        assert all(is_known(row) for row in outcome.rows)
    return outcomes


@pytest.fixture(scope="module", autouse=True)
def server():
    """The fork server takes seconds to start, on a busy machine a minute; no test's timing should hold them."""
    sweep("ok")


FAILURES = {
    "predicted-oom": ("predicted-oom", "needs 9.5 GiB, 1.5 GiB are free"),
    "unsupported": ("unsupported", "no tensor cores here"),
    "sys.exit": ("error", "SystemExit: 3"),
    "SIGKILL": ("error", "the cell's process died without a report: SIGKILL"),
    "exception": ("error", 'RuntimeError: first line, with a "quote"'),
}


@pytest.mark.slow
def test_failed_cells_are_one_row_without_a_metric(monkeypatch, capsys):
    monkeypatch.setattr(processes, "_oom_kills", lambda: 5)
    outcomes = sweep(*FAILURES, "allocator", "NaN")
    *known, allocator, not_finite = outcomes
    assert [(outcome.status, outcome.message) for outcome in known] == list(FAILURES.values())
    assert allocator.status == "oom" and "can't allocate memory" in allocator.message
    assert not_finite.status == "error" and "loss" in not_finite.message
    for outcome in outcomes:
        (row,) = outcome.rows
        assert not {"metric", "median", "samples"} & row.keys()
    printed = capsys.readouterr().err
    assert printed.count("Traceback (most recent call last)") == 3  # sys.exit, exception, NaN
    assert "[2/7] unsupported: unsupported: no tensor cores here (" in printed


def test_a_gpus_refusal_tells_tensors_from_fragments():
    text = (
        "CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 10.91 GiB "
        "is free. Including non-PyTorch memory, this process has 128.88 GiB memory in use. Of the allocated memory "
        "96.03 GiB is allocated by PyTorch, and 31.98 GiB is reserved by PyTorch but unallocated. If reserved but"
    )
    assert isolation.classify(torch.OutOfMemoryError(text)) == {
        "status": "oom",
        "message": "asked for 32.00 GiB of 139.80 GiB, 96.03 GiB in tensors and 31.98 GiB in free pieces too small",
    }


def test_a_kill_is_oom_if_the_kernel_counted_one(monkeypatch):
    counter = itertools.count()
    monkeypatch.setattr(processes, "_oom_kills", lambda: next(counter))
    assert sweep("SIGKILL")[0].status == "oom"


@pytest.mark.slow
def test_a_timeout_kills_all_ranks_and_all_that_they_started(tmp_path):
    """The ranks have several times as long as they take to start."""
    [outcome] = sweep(RankedCell("sleep on rank 1", str(tmp_path)), timeout_s=12.0)
    assert 12.0 <= outcome.seconds < 600  # for which it sleeps
    assert outcome.status == "timeout"
    assert all(is_gone(pid) for pid in wait_for_pids(tmp_path, 0))


@pytest.mark.slow
def test_every_cell_has_a_process_of_its_own_unless_it_shares_one():
    calls.append("in the parent")
    first, second = sweep("process", "process")
    assert len({first.median("pid"), second.median("pid"), os.getpid()}) == 3
    assert first.median("calls") == second.median("calls") == 1
    assert is_gone(int(first.median("pid")))
    endings = ("process", "unsupported", "process", "exception", "process", "allocator", "process")
    outcomes = sweep(*endings, Cell("process", seed=8), share=lambda cell: cell.seed)
    pids = [outcome.median("pid") for outcome in outcomes]
    assert pids[0] == pids[2]
    assert len({pids[2], pids[4], *pids[6:]}) == 4, "errors leave a process in doubt, another seed shares none"
    assert [outcome.median("calls") for outcome in outcomes[::2]] == [1, 3, 1, 1]


def test_rows_are_on_disk_before_the_next_cell_starts_and_a_failure_stops_nothing(tmp_path):
    endings = ("rows on disk", "unsupported", "rows on disk")
    outcomes = sweep(*(Cell(what, str(tmp_path)) for what in endings), folder=tmp_path)
    assert [outcome.median("lines") for outcome in outcomes] == [1, None, 3]
    rows = read_rows(tmp_path / "rows.csv")
    assert list(rows["status"]) == ["ok", "unsupported", "ok"]
    assert list(rows["what"]) == list(endings)
    assert all(is_known(row) for _, row in rows.iterrows())
    in_memory = outcome_rows(outcomes)[list(rows.columns)]
    assert in_memory["samples"].tolist() == rows["samples"].tolist()
    assert in_memory["metric"].tolist() == rows["metric"].tolist()


@pytest.mark.slow
def test_interrupted_and_killed_sweeps_keep_what_is_done_and_leave_no_process(tmp_path):
    """Both start at once, as imports take seconds."""
    folders = [tmp_path / "interrupted", tmp_path / "killed"]
    how = {"cwd": ROOT, "start_new_session": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *SCRIPT]
    interrupted, killed = scripts = [
        subprocess.Popen([*command, str(folder), "ok", "sleep", "ok"], **how) for folder in folders
    ]
    try:
        noted = {pid for folder in folders for pid in wait_for_pids(folder, 400)}
        started = [child.pid for script in scripts for child in psutil.Process(script.pid).children(recursive=True)]
        os.killpg(interrupted.pid, signal.SIGINT)
        killed.kill()
        out, err = interrupted.communicate()
        assert noted < set(started)
        assert all(is_gone(pid) for pid in started)
    finally:
        for script in scripts:
            script.kill()
            script.communicate()
    assert interrupted.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads(out.splitlines()[-1]) == ["ok", "interrupted"]
    rows, before_the_kill = (read_rows(folder / "rows.csv") for folder in folders)
    assert list(rows["what"]) == ["ok", "ok", "sleep"]
    assert list(rows["status"]) == ["ok", "ok", "interrupted"]
    assert all(is_known(row) for _, row in rows.iterrows())
    assert list(before_the_kill["status"]) == ["ok", "ok"]


@pytest.mark.slow
def test_cells_in_ranks_of_their_own_end_as_rows_and_ranks_may_stay_for_the_next_cell(tmp_path):
    whats = ("ok", "ok", "MemoryError on rank 1", "SIGKILL on rank 1")
    cells = [RankedCell(what, seed=seed) for seed, what in zip((7, 7, 8, 9), whats, strict=True)]
    outcomes = sweep(*cells, folder=tmp_path, share=lambda cell: cell.seed)
    assert [(outcome.status, outcome.message) for outcome in outcomes] == [
        ("ok", ""),
        ("ok", ""),
        ("oom", "rank 1: MemoryError: a list too long"),
        ("error", "rank 1 died without a report: SIGKILL"),
    ]
    first, second = outcomes[:2]
    assert first.median("sum_of_ones") == 2.0**5
    assert first.median("skewed") >= 2 * SKEW_S * 1e3, "the slowest rank counts"
    assert first.median("step") >= first.median("skewed")
    assert first.median("pid") == second.median("pid")
    assert {metric.name: len(metric.samples) for metric in first.metrics}["warmup_step"] == 2
    assert (read_rows(tmp_path / "rows.csv")["world_size"] == 2).all()


def test_too_many_ranks_are_refused_before_one_has_started(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    (outcome,) = run_sweep("bench", [RankedCell("ok", world_size=17)], measure, row_file=None, timeout_s=1.0)
    assert (outcome.status, outcome.message) == ("unsupported", "17 ranks are too many: at most 16 here, 16 a core")


@pytest.mark.slow
def test_under_a_launcher_failed_cells_are_rows_and_the_grid_goes_on_until_a_process_of_it_dies(tmp_path):
    expected = {
        "late@2": ("error", "rank 1: ArithmeticError: too late for the others to notice"),
        "ok@2": ("ok", ""),
        "stuck@2": ("error", "rank 1: ArithmeticError: nobody hears this"),
        "SIGKILL on rank 1@2": ("error", "rank 1 died without a report: SIGKILL"),
        "ok@3": ("unsupported", "takes 3 ranks, the launcher has started 2"),
    }
    # The first is a sweep of its own. That it was ok is in the launcher's store, where rank 0 asks how rank 1 has ended
    # the next sweep's first cell, before that one says so.
    late, *others = expected
    cells = ["ok@2", late, "ok@2", *others, "ok@2", "orphan@2", "ok@2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *SCRIPT]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path), *cells], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    rows = read_rows(tmp_path / "rows.csv")
    names = [f"{what}@{world_size}" for what, world_size in zip(rows["what"], rows["world_size"], strict=True)]
    assert dict(zip(names, zip(rows["status"], rows["message"], strict=True), strict=True)) == expected, done.stderr
    _, first, second, last = rows[rows["metric"] == "pid"]["median"]
    assert first == second != last, "ranks stay until a cell has failed"
    assert all(is_known(row) for _, row in rows[rows["world_size"] == 2].iterrows())
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr


def test_the_world_size_is_the_launchers_or_the_one_asked_for(monkeypatch):
    assert launcher.resolve_world_sizes(None, (2,)) == (2,)
    assert launcher.resolve_world_sizes((4, 1), (2,)) == (4, 1)
    assert isolation.reports()
    with pytest.raises(ValueError, match="got 1 0"):
        launcher.resolve_world_sizes((1, 0), (2,))
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.resolve_world_sizes(None, (2,)) == launcher.resolve_world_sizes((3,), (2,)) == (3,)
    assert not isolation.reports()
    with pytest.raises(ValueError, match="--world-size 2: the launcher has started 3 ranks"):
        launcher.resolve_world_sizes((2,), (2,))


def test_on_a_terminal_there_is_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for a terminal
    [outcome] = sweep("ok")
    shown = capsys.readouterr().err
    assert (outcome.median("value"), outcome.median("missing")) == (2.0, None)
    assert [outcome.rows[0][name] for name in ("variant", "what", "device", "seed")] == ["test", "ok", "cpu", 7]
    assert "━" in shown and "runs since" not in shown
