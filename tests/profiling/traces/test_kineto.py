"""torch.profiler: a real recording on the CPU, and files made by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.profiling.ranges import ranged
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.tables import TraceError


def event(cat: str, name: str, ts: float, dur: float, tid: int = 5, pid: int = 9, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_a_recording_is_read_back(tmp_path):
    path = tmp_path / "deep" / "trace.json.gz"
    a = torch.randn(64, 64)
    with kineto.recording(path, torch.device("cpu")), ranged("outer"):
        with ranged("product"):
            b = a @ a
        b.exp()
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    trace = kineto.read(path)
    assert not trace.has_gpu
    assert trace.ranges[["name", "depth"]].to_numpy().tolist() == [["outer", 0], ["product", 1]]
    assert set(trace.operations(trace.instances("product"))["name"]) <= {"aten::mm", "aten::matmul"}
    assert "aten::exp" in set(trace.operations(trace.instances("outer"))["name"])


def test_kernels_meet_their_launches(tmp_path):
    events = [
        event("user_annotation", "step", 1000.0, 50.0),
        event("cuda_runtime", "cudaLaunchKernel", 1010.5, 2.0, correlation=3),
        event("cuda_driver", "cuLaunchKernelEx", 1020.0, 2.0, tid=6, correlation=4),
        event("cuda_runtime", "cudaDeviceSynchronize", 1030.0, 2.0),
        event("kernel", "gemm", 1012.25, 10.125, tid=7, pid=0, correlation=3, device=0, stream=7),
        event("gpu_memcpy", "Memcpy DtoH", 1025.0, 1.0, tid=8, pid=0, correlation=4, device=0, stream=8),
        event(
            "gpu_memcpy",
            "Memcpy PtoP (Device -> Device)",
            1026.0,
            1.0,
            tid=9,
            pid=0,
            correlation=5,
            fromDevice=1,
            stream=9,
        ),
        event("gpu_memset", "Memset (Device)", 1027.0, 1.0, tid=8, pid=0, correlation=77, device=0, stream=8),
        event("kernel", "backwards in time", 1029.0, -3.0, tid=7, pid=0, correlation=78, device=0, stream=7),
        event("gpu_user_annotation", "step", 1012.25, 20.0, tid=7, pid=0),
        event("cpu_op", "aten::mm", 1009.0, 5.0),
        {"ph": "M", "name": "process_name", "pid": 9, "args": {}},
    ]
    trace = kineto.read(write(tmp_path / "trace.json", events))
    rows = trace.ops.drop(columns="device").to_numpy().tolist()
    assert rows == [
        ["gemm", "kernel", 1_012_250, 1_022_375, 9, 7, 5, 1_010_500, 3],
        ["memcpy", "copy", 1_025_000, 1_026_000, 9, 8, 6, 1_020_000, 4],
        ["memcpy PtoP", "copy", 1_026_000, 1_027_000, 9, 9, -1, 1_026_000, 5],
        ["memset", "fill", 1_027_000, 1_028_000, 9, 8, -1, 1_027_000, 77],
        ["backwards in time", "kernel", 1_029_000, 1_029_000, 9, 7, -1, 1_029_000, 78],
    ]
    assert trace.ranges["name"].tolist() == ["step"]
    assert len(trace.operations(trace.instances("step"))) == 5


def test_operators_are_cut_where_the_work_is_done(tmp_path):
    events = [
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::t", 1, 2),
        event("cpu_op", "aten::addmm", 5, 90),
        event("cpu_op", "aten::sum", 200, 50),
        event("cpu_op", "aten::fill_", 205, 5),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 300, 50),
        event("cpu_op", "torch::autograd::AccumulateGrad", 360, 50),
        event("cpu_op", "MulBackward0", 301, 45),
        event("cpu_op", "aten::mul", 303, 20),
        event("cpu_op", "aten::mul", 304, 10, tid=6),
    ]
    ops = kineto.read(write(tmp_path / "trace.json", events)).ops
    assert ops["name"].tolist() == ["aten::t", "aten::addmm", "aten::sum", "aten::mul", "aten::mul"]
    assert ops["launch_tid"].tolist() == [5, 5, 5, 5, 6]
    assert (ops["launch_start"] == ops["start"]).all()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
        b'{"other": 1}',
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": "x", "dur": 1}]}',
    ],
)
def test_bad_and_missing_files_are_named(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    for named in (path, tmp_path / "nowhere.json"):
        with pytest.raises(TraceError, match=named.name):
            kineto.read(named)
