"""Every way in which a cell can end, in real processes; and sweeps that are interrupted or killed."""

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
from cs336_systems.harness import process, sweep
from cs336_systems.harness.record import STATUSES, RowFile, read_rows, schema_columns
from cs336_systems.harness.sweep import cell_columns, outcome_rows, run_sweep
from tests.harness.cells import Cell, calls, measure

ROOT = Path(__file__).resolve().parents[2]
ALWAYS_KNOWN = ("host", "python", "torch", "commit", "argv", "seed", "timestamp", "state_before")


def is_gone(pid, within_s=5.0):
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


def start_script(folder):
    """A sweep of its own, the third of whose four cells takes too long."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.harness.sweep_script", str(folder), "ok", "ok", "sleep", "ok"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """(process, folder) of two sweeps of their own; they need seconds to import, so both start at once."""
    folders = [tmp_path_factory.mktemp(name) for name in ("interrupted", "killed")]
    started = [(start_script(folder), folder) for folder in folders]
    try:
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module", autouse=True)
def server():
    """The fork server takes seconds to start; no test's timing should hold them."""
    run("ok", timeout_s=60)


def run(what, folder="", timeout_s=30.0):
    """The outcome of one cell, which has left no process behind."""
    cells = [Cell(what, str(folder))]
    [outcome] = run_sweep("bench", cells, measure, row_file=None, timeout_s=timeout_s)
    assert outcome.status in STATUSES
    assert all(row["status"] == outcome.status and row["message"] == outcome.message for row in outcome.rows)
    assert all(is_known(row) for row in outcome.rows)
    return outcome


def test_ok():
    outcome = run("ok")
    assert (outcome.status, outcome.message) == ("ok", "")
    assert [row["metric"] for row in outcome.rows] == ["value", "rate"]
    assert outcome.median("value") == 2.0
    assert outcome.median("missing") is None
    row = outcome.rows[0]
    assert (row["benchmark"], row["variant"], row["what"], row["device"], row["seed"]) == (
        "bench",
        "test",
        "ok",
        "cpu",
        7,
    )
    assert json.loads(row["state_after"])


@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ("predicted-oom", "predicted-oom", "needs 9.5 GiB, 1.5 GiB are free"),
        ("unsupported", "unsupported", "no tensor cores here"),
        ("MemoryError", "oom", "MemoryError: a list too long"),
        ("sys.exit", "error", "SystemExit: 3"),
        ("os._exit", "error", "the cell's process died without a report: exit code 3"),
        ("SIGKILL", "error", "the cell's process died without a report: SIGKILL"),
        ("SIGSEGV", "error", "the cell's process died without a report: SIGSEGV"),
        ("exception", "error", 'RuntimeError: first line, with a "quote"'),
    ],
)
def test_failed_cells_are_one_row_without_a_metric(what, status, message, monkeypatch, capsys):
    monkeypatch.setattr(processes, "_oom_kills", lambda: 5)
    outcome = run(what)
    assert (outcome.status, outcome.message) == (status, message)
    (row,) = outcome.rows
    assert not {"metric", "median", "samples"} & row.keys()
    *printed, line = capsys.readouterr().err.splitlines(keepends=True)
    assert line.startswith(f"[1/1] {what}: {status}: {message} (")
    printed = "".join(printed)
    if what in ("exception", "sys.exit"):
        assert printed.startswith("Traceback")
        assert "in measure" in printed
        assert what != "exception" or "second line" in printed
    else:
        assert printed == ""


def test_a_gpus_refusal_tells_tensors_from_fragments():
    text = (
        "CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 10.91 GiB "
        "is free. Including non-PyTorch memory, this process has 128.88 GiB memory in use. Of the allocated memory "
        "96.03 GiB is allocated by PyTorch, and 31.98 GiB is reserved by PyTorch but unallocated. If reserved but"
    )
    assert process.classify(torch.OutOfMemoryError(text)) == {
        "status": "oom",
        "message": "asked for 32.00 GiB of 139.80 GiB, 96.03 GiB in tensors and 31.98 GiB in free pieces too small",
    }


def test_the_allocators_refusal_is_oom():
    outcome = run("allocator")
    assert outcome.status == "oom"
    assert "can't allocate memory" in outcome.message


def test_a_nan_is_an_error_that_names_the_metric():
    outcome = run("NaN")
    assert outcome.status == "error"
    assert "metric loss needs finite samples" in outcome.message
    assert len(outcome.rows) == 1


def test_a_kill_is_oom_if_the_kernel_counted_one(monkeypatch):
    counter = iter([5, 6])
    monkeypatch.setattr(processes, "_oom_kills", lambda: next(counter))
    outcome = run("SIGKILL")
    assert (outcome.status, outcome.message) == ("oom", "killed by the kernel's out-of-memory killer")


def test_a_crash_is_no_oom_even_if_the_kernel_killed_something_else(monkeypatch):
    counter = iter([5, 6])
    monkeypatch.setattr(processes, "_oom_kills", lambda: next(counter))
    assert run("os._exit").status == "error"


@pytest.mark.timing
def test_a_timeout_kills_the_cell_and_all_that_it_started(tmp_path):
    started = time.perf_counter()
    outcome = run("sleep", tmp_path, timeout_s=1.5)
    assert 1.5 <= outcome.seconds <= time.perf_counter() - started < 60  # it sleeps for 120
    assert (outcome.status, outcome.message) == ("timeout", "took longer than 1.5 s and was killed")
    cell, grandchild = wait_for_pids(tmp_path, 0)
    assert is_gone(cell)
    assert is_gone(grandchild)


def test_every_cell_has_a_process_of_its_own():
    calls.append("in the parent")
    first, second = run("process"), run("process")
    assert len({first.median("pid"), second.median("pid"), os.getpid()}) == 3
    assert first.median("calls") == second.median("calls") == 1
    assert is_gone(int(first.median("pid")))


def sweep_cells(cells, folder, share=None):
    return run_sweep(
        "bench",
        cells,
        measure,
        row_file=RowFile(folder / "rows.csv", cell_columns(Cell)),
        timeout_s=30,
        share=share,
    )


def test_cells_share_a_process_until_one_leaves_it_in_doubt(tmp_path):
    endings = ("process", "unsupported", "process", "exception", "process")
    outcomes = list(sweep_cells([Cell(what) for what in endings], tmp_path, share=lambda cell: cell.device))
    assert [outcome.status for outcome in outcomes] == ["ok", "unsupported", "ok", "error", "ok"]
    first, second, fresh = (outcome.median("pid") for outcome in outcomes[::2])
    assert first == second != fresh
    assert [outcome.median("calls") for outcome in outcomes[::2]] == [1, 3, 1]
    assert is_gone(int(first))
    assert is_gone(int(fresh))


def test_cells_that_differ_in_what_they_share_have_their_own_process(tmp_path):
    cells = [Cell("process", seed=seed) for seed in (1, 1, 2)]
    first, second, third = sweep_cells(cells, tmp_path, share=lambda cell: cell.seed)
    assert first.median("pid") == second.median("pid") != third.median("pid")


@pytest.mark.slow
def test_rows_are_on_disk_before_the_next_cell_starts_and_a_failure_stops_nothing(tmp_path, capsys):
    endings = ("rows on disk", "unsupported", "rows on disk")
    outcomes = list(sweep_cells([Cell(what, str(tmp_path)) for what in endings], tmp_path))
    assert [outcome.median("lines") for outcome in outcomes] == [1, None, 3]
    rows = read_rows(tmp_path / "rows.csv")
    assert list(rows["status"]) == ["ok", "unsupported", "ok"]
    assert list(rows["what"]) == list(endings)
    assert all(is_known(row) for _, row in rows.iterrows())
    in_memory = outcome_rows(outcomes)[list(rows.columns)]
    assert in_memory["samples"].tolist() == rows["samples"].tolist()
    assert in_memory["metric"].tolist() == rows["metric"].tolist()
    # off a terminal, progress is one plain line per cell
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("[1/3] rows on disk: ok (")
    assert second.startswith("[2/3] unsupported: unsupported: no tensor cores here (")
    assert third.startswith("[3/3] ")


@pytest.mark.filterwarnings("error")
def test_rows_in_memory_have_every_column_even_if_nothing_was_measured():
    failed = sweep.Outcome(Cell("oom"), "oom", rows=[{"status": "oom", "message": "no room", "device": "cpu"}])
    frame = outcome_rows([failed])
    assert set(schema_columns(["device"])) == set(frame.columns)
    assert frame.iloc[0][["metric", "unit", "gpu", "samples"]].tolist() == ["", "", "", []]
    assert outcome_rows([]).empty
    assert set(schema_columns([])) == set(outcome_rows([]).columns)


def test_a_full_disk_ends_the_sweep_with_every_earlier_row_on_disk(tmp_path, monkeypatch):
    outcomes = []
    really_append = RowFile.append

    def append(self, rows):
        if len(outcomes) == 2:
            raise OSError(28, "No space left on device")
        really_append(self, rows)

    monkeypatch.setattr(RowFile, "append", append)
    with pytest.raises(OSError, match="No space left"):
        for outcome in sweep_cells([Cell("ok"), Cell("process"), Cell("ok")], tmp_path):
            outcomes.append(outcome)
    assert [outcome.cell.what for outcome in outcomes] == ["ok", "process"]
    assert list(read_rows(tmp_path / "rows.csv")["metric"]) == ["value", "rate"]


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(scripts):
    process, folder = scripts[0]
    cell, grandchild = wait_for_pids(folder, 60)
    descendants = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads(out.splitlines()[-1]) == ["ok", "ok", "interrupted"]
    rows = read_rows(folder / "rows.csv")
    assert list(rows["what"]) == ["ok", "ok", "ok", "ok", "sleep"]
    assert list(rows["status"]) == ["ok"] * 4 + ["interrupted"]
    assert list(rows["metric"]) == ["value", "rate"] * 2 + [""]
    assert all(is_known(row) for _, row in rows.iterrows())
    assert {cell, grandchild} < set(descendants)
    assert all(is_gone(pid) for pid in descendants)


@pytest.mark.slow
def test_ctrl_c_while_the_fork_server_starts_is_a_row_and_leaves_no_process(tmp_path):
    process = start_script(tmp_path)
    assert process.stdout.readline() == "begins\n"
    deadline = time.perf_counter() + 10
    while not (descendants := [child.pid for child in psutil.Process(process.pid).children(recursive=True)]):
        assert time.perf_counter() < deadline, "the server has not started"
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)  # until the server, which holds the pipes, has ended as well
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads(out.splitlines()[-1]) == ["interrupted"]
    assert list(read_rows(tmp_path / "rows.csv")["status"]) == ["interrupted"]
    assert all(is_gone(pid) for pid in descendants)


@pytest.mark.slow
def test_a_cell_dies_with_a_sweep_that_is_killed(scripts):
    process, folder = scripts[1]
    cell, grandchild = wait_for_pids(folder, 60)
    descendants = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.wait()
    assert {cell, grandchild} < set(descendants)
    assert all(is_gone(pid) for pid in descendants)
    assert list(read_rows(folder / "rows.csv")["status"]) == ["ok"] * 4
