"""nsys: the command it is given, and exports made by hand that hold every trap of the format."""

import sqlite3
import stat
from pathlib import Path

import pytest

from cs336_systems.profiling.recording import read_trace
from cs336_systems.profiling.traces import nsys
from cs336_systems.profiling.traces.tables import TraceError

PROCESS, OTHER = 0x01_0000_2A_000000, 0x01_0000_2B_000000
"""globalPid of processes 42 and 43 of one machine."""

SCHEMA = """
CREATE TABLE StringIds (id INTEGER, value TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER, "end" INTEGER, eventType INTEGER, text TEXT, textId INTEGER,
    globalTid INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, "end" INTEGER, globalTid INTEGER, correlationId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER);
"""


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Two processes that use the same correlation ids, and ranges of every kind."""
    path = tmp_path / "export.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "gemm"), (2, "relu"), (3, "registered")])
        database.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)",
            [
                (0, 1000, 59, "pushed", None, PROCESS + 7),
                (10, 500, 59, None, 3, PROCESS + 7),
                (20, 600, 60, "started", None, PROCESS + 8),
                (30, None, 59, "never closed", None, PROCESS + 7),
                (40, None, 34, "a mark", None, PROCESS + 7),
                (50, 60, 75, None, None, PROCESS + 7),
            ],
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)",
            [(100, 105, PROCESS + 7, 1), (110, 115, PROCESS + 8, 2), (120, 125, OTHER + 9, 1)],
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (200, 300, 0, 7, 1, PROCESS, 1, 1),
                (300, 340, 0, 7, 2, PROCESS, 2, 2),
                (210, 280, 1, 7, 1, OTHER, 1, 1),
                (700, 900, 0, 7, 99, PROCESS, 2, 2),
            ],
        )
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (150, 160, 0, 7, 2, ?)", (PROCESS,))
    database.close()
    return path


def test_operations_meet_the_launch_of_their_own_process(export):
    ops = nsys.read(export).ops
    launches = {(op.pid, op.name, op.start): (op.launch_tid, op.launch_start) for op in ops.itertuples()}
    assert launches == {
        (42, "memcpy", 150): (8, 110),
        (42, "gemm", 200): (7, 100),
        (43, "gemm", 210): (9, 120),
        (42, "relu", 300): (8, 110),
        (42, "relu", 700): (-1, 700),
    }
    assert ops["kind"].tolist() == ["copy", "kernel", "kernel", "kernel", "kernel"]
    assert ops["device"].tolist() == [0, 0, 1, 0, 0]


def test_ranges_of_every_kind(export):
    ranges = nsys.read(export).ranges
    found = {row.name: (row.start, row.end, row.pid, row.tid, row.depth) for row in ranges.itertuples(index=False)}
    assert found == {
        "pushed": (0, 1000, 42, 7, 0),
        "registered": (10, 500, 42, 7, 1),
        "started": (20, 600, 42, 8, 0),
        "never closed": (30, 900, 42, 7, 2),
    }


def test_empty_corrupted_foreign_and_missing_files_are_named(tmp_path, export):
    cases = {"empty": b"", "text": b"hello, I am no database at all" * 100, "torn": export.read_bytes()[:6000]}
    for name, content in cases.items():
        path = tmp_path / f"{name}.sqlite"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=f"{name}.sqlite"):
            nsys.read(path)
    with pytest.raises(TraceError, match="no such file"):
        nsys.read(tmp_path / "nowhere.sqlite")
    (report := tmp_path / "step.nsys-rep").write_bytes(b"nsys's own")
    with pytest.raises(TraceError, match="nsys export"):
        read_trace(report)


def test_exports_without_what_is_asked_for(export):
    with sqlite3.connect(export) as database:
        database.executescript("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN demangledName")
        with pytest.raises(TraceError, match="export.sqlite"):
            nsys.read(export)
        database.executescript("DROP TABLE NVTX_EVENTS")
    with pytest.raises(TraceError, match="export.sqlite"):
        nsys.read(export)


def fake_nsys(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nsys"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_failed_program_and_a_missing_report_are_errors(tmp_path, monkeypatch):
    fake_nsys(tmp_path, "echo CUDA went away >&2; exit 3", monkeypatch)
    with pytest.raises(TraceError, match="nsys profile ended with exit code 3: CUDA went away"):
        nsys.record(["false"], tmp_path / "step")
    fake_nsys(tmp_path, "exit 0", monkeypatch)
    with pytest.raises(TraceError, match="wrote no"):
        nsys.record(["true"], tmp_path / "step")
