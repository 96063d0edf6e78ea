"""torch.profiler (Kineto): record to a Chrome trace, read that.

    with recording(folder / "step.json.gz", device):
        ...
    trace = read(folder / "step.json.gz")

In the file an operation on the GPU and its launch share ``args.correlation``; its process id is the device's number, so
the process and thread are the launch's. Ranges are ``user_annotation`` events; their ``gpu_user_annotation`` shadows
include gaps and are not read. Times are microseconds with three decimals; a negative duration, which Kineto sometimes
writes, counts as none. On a CPU the operations are operators: they nest, and a tree of them is cut where an operator's
own time is more than half of it, so that what remains is disjoint (``aten::linear`` gives way to ``aten::addmm``, which
did the work).
"""

import gzip
import json
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from cs336_systems.profiling.traces import nsys
from cs336_systems.profiling.traces.kernels import PEER_COPY
from cs336_systems.profiling.traces.tables import (
    COPY,
    FILL,
    KERNEL,
    OP_COLUMNS,
    OPERATOR,
    RANGE_COLUMNS,
    Trace,
    TraceError,
    make_trace,
)

_GPU_CATEGORIES = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": FILL}
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")

_OPERATOR_NAME = re.compile(r"(?!(torch::)?autograd::)\w+::")
"""``aten::mm``, but not autograd's own bookkeeping, nor functions written in Python, which work through operators."""


@contextmanager
def recording(path: Path, device: torch.device) -> Iterator[None]:
    """Record what happens inside to a Chrome trace at ``path`` (gzipped if it ends in ``.gz``).

    torch's own tables of the events are not made (``acc_events``): they take a minute for a million events.

    Raises:
        TraceError: the process runs under nsys, and two profilers would contend for the device.
    """
    if nsys.is_attached():
        raise TraceError("torch.profiler cannot record in a process that nsys is profiling: use one of the two")
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # one cycle, all of it in the file
        profiler.start()
    try:
        yield
    finally:
        profiler.stop()
    if path.suffix != ".gz":
        profiler.export_chrome_trace(str(path))
        return
    with tempfile.TemporaryDirectory() as folder:  # torch would gzip at level 9, ten times as slowly
        exported = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(exported))
        with exported.open("rb") as whole, gzip.open(path, "wb", compresslevel=1) as compressed:
            shutil.copyfileobj(whole, compressed, 2**20)


def read(path: Path) -> Trace:
    """The tables of a Chrome trace written by torch.profiler.

    Raises:
        TraceError: not readable, not JSON, not a trace of torch.profiler, or one without operations.
    """
    events = _events(path)
    try:
        gpu = _gpu_operations(events)
        ops = gpu if len(gpu) else _cpu_operations(events)
        ranges = [
            (str(e["name"]), *_span(e), int(e["pid"]), int(e["tid"]))
            for e in events
            if e.get("cat") == "user_annotation"
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is not a trace of torch.profiler: an event has a bad or no {error}") from error
    columns = [column for column in RANGE_COLUMNS if column != "depth"]
    return make_trace(ops, pd.DataFrame(ranges, columns=columns), path)


def _events(path: Path) -> list[dict[str, Any]]:
    """The complete (``X``) events of the file."""
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TraceError(f"{path} cannot be read as a Chrome trace: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TraceError(f"{path} is not a Chrome trace: it has no list of traceEvents")
    return [event for event in content["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]


def _span(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end of an event, in nanoseconds."""
    start, duration = (round(float(event[key]) * 1000) for key in ("ts", "dur"))
    return start, start + max(0, duration)


def _gpu_operations(events: list[dict[str, Any]]) -> pd.DataFrame:
    """Kernels, copies and fills with the calls that launched them; empty if there are none."""
    launches: dict[int, tuple[int, int, int]] = {}
    for event in events:
        if event.get("cat") in _LAUNCH_CATEGORIES and "correlation" in event.get("args", {}):
            launch = (_span(event)[0], int(event["pid"]), int(event["tid"]))
            correlation = int(event["args"]["correlation"])
            launches[correlation] = min(launch, launches.get(correlation, launch))
    process = next((int(e["pid"]) for e in events if e.get("cat") == "user_annotation"), -1)
    rows = []
    for event in events:
        if kind := _GPU_CATEGORIES.get(event.get("cat", "")):
            (start, end), args = _span(event), event["args"]
            correlation = int(args["correlation"])
            launch_start, pid, tid = launches.get(correlation, (start, process, -1))
            name = str(event["name"]) if kind == KERNEL else {COPY: "memcpy", FILL: "memset"}[kind]
            device = args["device"] if kind != COPY or "device" in args else event["pid"]
            if "device" not in args:  # between two GPUs, of which it says from which and to which
                name = PEER_COPY
            where = (pid, int(device), int(args["stream"]))
            rows.append((name, kind, start, end, *where, tid, launch_start, correlation))
    return pd.DataFrame(rows, columns=list(OP_COLUMNS))


def _cpu_operations(events: list[dict[str, Any]]) -> pd.DataFrame:
    """Operators that did work themselves, disjoint on each thread."""
    threads: dict[tuple[int, int], list[_Operator]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and _OPERATOR_NAME.match(str(event["name"])):
            operator = _Operator(str(event["name"]), *_span(event))
            threads.setdefault((int(event["pid"]), int(event["tid"])), []).append(operator)
    rows = [
        (operator.name, OPERATOR, operator.start, operator.end, pid, -1, tid, tid, operator.start, -1)
        for (pid, tid), operators in threads.items()
        for operator in _working(operators)
    ]
    return pd.DataFrame(rows, columns=list(OP_COLUMNS))


@dataclass
class _Operator:
    """One operator and the time that its direct children take, in nanoseconds."""

    name: str
    start: int
    end: int
    children_ns: int = 0


def _working(operators: list[_Operator]) -> list[_Operator]:
    """The outermost operators whose own time is more than half of their duration, of one thread."""
    operators = sorted(operators, key=lambda operator: (operator.start, -operator.end))
    stack: list[_Operator] = []
    for operator in operators:
        while stack and stack[-1].end <= operator.start:
            stack.pop()
        if stack:
            stack[-1].children_ns += operator.end - operator.start
        stack.append(operator)
    outermost: list[_Operator] = []
    for operator in operators:
        inside = outermost and operator.start < outermost[-1].end
        if not inside and 2 * operator.children_ns < operator.end - operator.start:
            outermost.append(operator)
    return outermost
