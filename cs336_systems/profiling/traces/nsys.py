"""NVIDIA Nsight Systems: record a command under ``nsys``, export the report to SQLite, read that.

    record([sys.executable, "program.py"], folder / "step")  # step.nsys-rep, step.sqlite
    trace = read(folder / "step.sqlite")

CPU samples and context switches are not collected (they are most of a default report's size and answer nothing here).
In the export an operation and its launch share a ``correlationId``, which is unique within one process only; a thread's
``globalTid`` holds the process in bits 24 to 47 and the thread below. Ranges are pushed and popped (event type 59) or
started and ended (60); one that never ended has no end and is closed with the last event of the trace. Names are ids
into ``StringIds``. Replays of CUDA graphs are recorded kernel by kernel (``--cuda-graph-trace=node``).
"""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pandas as pd

from cs336_systems.profiling.traces.tables import COPY, FILL, KERNEL, Trace, TraceError, make_trace

MISSING = (
    "nsys is not on PATH: it comes with NVIDIA Nsight Systems (https://developer.nvidia.com/nsight-systems); "
    "torch.profiler needs no installation"
)
"""The message for a user who has no nsys."""

REPORT, EXPORT = ".nsys-rep", ".sqlite"
"""Endings of nsys's own report and of what is read here."""

_SESSION_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
"""Set by nsys in the environment of what it profiles."""

_OPS = """
SELECT {name} AS name, '{kind}' AS kind, o.start, o."end", (o.globalPid >> 24) & 16777215 AS pid,
       o.deviceId AS device, o.streamId AS stream, r.globalTid & 16777215 AS launch_tid,
       r.start AS launch_start, o.correlationId AS correlation
FROM {table} o
LEFT JOIN (
    SELECT correlationId, globalTid, MIN(start) AS start FROM CUPTI_ACTIVITY_KIND_RUNTIME
    GROUP BY correlationId, globalTid & -16777216
) r ON r.correlationId = o.correlationId AND (r.globalTid & -16777216) = o.globalPid
{names}
"""

_RANGES = """
SELECT COALESCE(s.value, e.text) AS name, e.start, COALESCE(e."end", {last}) AS "end",
       (e.globalTid >> 24) & 16777215 AS pid, e.globalTid & 16777215 AS tid
FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId
WHERE e.eventType IN (59, 60) AND COALESCE(s.value, e.text) IS NOT NULL
"""

_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (KERNEL, "COALESCE(n.value, 'unnamed kernel')"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (KERNEL, "'CUDA graph'"),  # graphs that were traced as a whole
    "CUPTI_ACTIVITY_KIND_MEMCPY": (COPY, "'memcpy'"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (FILL, "'memset'"),
}


def is_attached() -> bool:
    """Whether this process already runs under nsys."""
    return any(name in os.environ for name in _SESSION_VARIABLES)


def record(program: Sequence[str], report: Path) -> str:
    """Run a program under nsys and export what it recorded; returns what it printed, nsys's own lines among it.

    Raises:
        TraceError: there is no nsys, the program or the export failed, or no report was written.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise TraceError(MISSING)
    report.parent.mkdir(parents=True, exist_ok=True)
    written, exported = report.with_suffix(REPORT), report.with_suffix(EXPORT)
    written.unlink(missing_ok=True)
    exported.unlink(missing_ok=True)
    collected = ("--sample=none", "--cpuctxsw=none", "--trace=cuda,nvtx", "--cuda-graph-trace=node")
    recording = [nsys, "profile", *collected, "--force-overwrite=true", f"--output={written}", *program]
    exporting = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={exported}", str(written)]
    printed = []
    for command in (recording, exporting):
        done = subprocess.run(command, capture_output=True, errors="replace", check=False)
        printed.append(done.stdout)
        if done.returncode:
            tail = " | ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
            raise TraceError(f"nsys {command[1]} ended with exit code {done.returncode}: {tail}")
    if not exported.exists():
        raise TraceError(f"nsys wrote no {exported}")
    return printed[0]


def read(path: Path) -> Trace:
    """The tables of an exported report.

    Raises:
        TraceError: not an SQLite file, not an export of nsys, or one without CUDA activity.
    """
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    if path.suffix == REPORT:
        raise TraceError(f"{path} is a report that must be exported first: nsys export --type=sqlite {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _read(database, path)
    except (sqlite3.Error, pd.errors.DatabaseError) as error:
        raise TraceError(f"{path} cannot be read as an nsys export: {str(error).splitlines()[-1]}") from error


def _read(database: sqlite3.Connection, path: Path) -> Trace:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := {"StringIds", "NVTX_EVENTS"} - tables:
        raise TraceError(f"{path} is not an nsys export with NVTX ranges: it lacks {', '.join(sorted(missing))}")
    present = [table for table in _TABLES if table in tables]
    if not present or "CUPTI_ACTIVITY_KIND_RUNTIME" not in tables:
        raise TraceError(f"{path}: the trace holds no CUDA activity")
    parts = []
    for table in present:
        kind, name = _TABLES[table]
        names = "LEFT JOIN StringIds n ON n.id = o.demangledName" if "n.value" in name else ""
        parts.append(pd.read_sql(_OPS.format(table=table, kind=kind, name=name, names=names), database))
    ops = pd.concat([part for part in parts if not part.empty] or parts[:1])
    last = int(ops["end"].max()) if len(ops) else 0
    # Work that no traced API call launched (a replayed graph's nodes, say) is its own launch, on no known thread.
    ops["launch_start"] = ops["launch_start"].fillna(ops["start"])
    ops["launch_tid"] = ops["launch_tid"].fillna(-1)
    return make_trace(ops, pd.read_sql(_RANGES.format(last=last), database), path)
