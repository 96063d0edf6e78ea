"""Golden traces: one program, recorded on an H200 by nsys 2025.3 and by torch.profiler 2.11, cut to what is read.

Two blocks (d_model 1024, d_ff 4096, 16 heads, vocabulary 10,000), batch 4, context 512, fp32, fused AdamW; one warm-up
and two recorded steps, all under ``annotate`` and ``ranged_phases``.
"""

import gzip
import itertools
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from cs336_systems.profiling.traces import kineto, nsys
from cs336_systems.profiling.traces.tables import KERNEL, Trace, make_trace

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def golden_nsys(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("golden") / "nsys.sqlite"
    path.write_bytes(gzip.decompress((FIXTURES / "nsys.sqlite.gz").read_bytes()))
    return nsys.read(path)


@pytest.fixture(scope="session")
def golden_kineto() -> Trace:
    return kineto.read(FIXTURES / "kineto.json.gz")


@pytest.fixture
def trace_of() -> Callable[..., Trace]:
    """Build a trace from (name, start, end, launch_tid, launch_start[, stream]) and (name, start, end, tid) tuples."""

    def build(ops: list[tuple], ranges: list[tuple], pid: int = 1) -> Trace:
        correlation = itertools.count()
        op_rows = [
            {
                "name": name,
                "kind": KERNEL,
                "start": start,
                "end": end,
                "pid": pid,
                "device": 0,
                "stream": stream[0] if stream else 7,
                "launch_tid": tid,
                "launch_start": launched,
                "correlation": next(correlation),
            }
            for name, start, end, tid, launched, *stream in ops
        ]
        range_rows = [(name, start, end, pid, tid) for name, start, end, tid in ranges]
        columns = ["name", "start", "end", "pid", "tid"]
        return make_trace(pd.DataFrame(op_rows), pd.DataFrame(range_rows, columns=columns), Path("made up"))

    return build
