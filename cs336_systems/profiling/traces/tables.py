"""A trace as two tables: what the device executed and the ranges around the calls that launched it.

Whatever recorded it, a trace is read into the same columns (times in nanoseconds on one clock):

    ops     name, kind, start, end, pid, device, stream, launch_tid, launch_start, correlation
    ranges  name, start, end, pid, tid, depth

``kind`` is one of ``KINDS``. On a GPU an operation is a kernel, copy or fill; ``launch_tid`` and ``launch_start`` are
the thread and time of the API call that launched it. On a CPU an operation is an operator; it launches itself, its
device is -1 and its stream is its thread. ``depth`` counts the ranges open around one on its own thread.

**Which range holds an operation?** The one whose thread launched it while the range was open. Backward needs one more
rule: the caller's thread waits inside ``backward()`` while autograd's thread launches the kernels, so by threads alone
the caller's ``backward`` range would hold next to nothing (a few fills; every matmul would belong to no range). Hence
ranges of the *caller's* thread, the one that opened the process's first range, hold what any thread of the process
launches meanwhile; ranges of other threads hold only their own. The other remedy, backward on the caller's thread
(``torch.autograd.set_multithreading_enabled(False)``), would profile another program than the one that is timed.
The rule assumes that a process does one thing at a time, as a training step does; two steps in two threads of one
process cannot be told apart.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

KERNEL, COPY, FILL, OPERATOR = "kernel", "copy", "fill", "operator"
GPU_KINDS = (KERNEL, COPY, FILL)
KINDS = (*GPU_KINDS, OPERATOR)

OP_COLUMNS: dict[str, type] = {
    **dict.fromkeys(("name", "kind"), object),
    **dict.fromkeys(("start", "end", "pid", "device", "stream", "launch_tid", "launch_start", "correlation"), np.int64),
}
RANGE_COLUMNS: dict[str, type] = {
    "name": object,
    **dict.fromkeys(("start", "end", "pid", "tid", "depth"), np.int64),
}


class TraceError(Exception):
    """A trace could not be recorded, is not a trace, or does not hold what was asked of it; the message says which."""


@dataclass(frozen=True)
class Trace:
    """One recording. Build it with ``make_trace``, which orders and checks the tables."""

    ops: pd.DataFrame
    ranges: pd.DataFrame
    source: Path

    @functools.cached_property
    def has_gpu(self) -> bool:
        """Whether the operations ran on a GPU; otherwise they are CPU operators."""
        return bool(self.ops["kind"].isin(GPU_KINDS).any())

    @functools.cached_property
    def callers(self) -> dict[int, int]:
        """The caller's thread of each process: the one that opened its first range."""
        first = self.ranges.drop_duplicates("pid")
        return dict(zip(first["pid"], first["tid"], strict=True))

    @functools.cached_property
    def _launches(self) -> pd.DataFrame:
        return self.ops.sort_values("launch_start", kind="stable")

    def instances(self, name: str, inside: str | None = None) -> pd.DataFrame:
        """The ranges called ``name``, in order; with ``inside``, those during a range of that name of their process.

        Raises:
            TraceError: there is none.
        """
        found = self.ranges[self.ranges["name"] == name]
        if inside is not None:
            found = self.during(found, self.instances(inside))
        if found.empty:
            where = f" inside {inside!r}" if inside is not None else ""
            raise TraceError(f"{self.source}: no range {name!r}{where}")
        return found

    def during(self, ranges: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
        """The rows of ``ranges`` that lie inside one of ``windows`` of the same process, whatever the thread."""
        held = np.zeros(len(ranges), dtype=bool)
        for _, window in windows.iterrows():
            inside = (ranges["start"] >= window["start"]) & (ranges["end"] <= window["end"])
            held |= (inside & (ranges["pid"] == window["pid"])).to_numpy()
        return ranges[held]

    def operations(self, instances: pd.DataFrame) -> pd.DataFrame:
        """The operations that these ranges hold, each once per range, with ``instance``: the range's index."""
        ops = self._launches
        launched, pids, tids = (ops[column].to_numpy() for column in ("launch_start", "pid", "launch_tid"))
        positions, owners = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for index, pid, tid, start, end in instances[["pid", "tid", "start", "end"]].itertuples(name=None):
            first, last = np.searchsorted(launched, [start, end + 1])
            own = pids[first:last] == pid
            if self.callers[pid] != tid:
                own &= tids[first:last] == tid
            positions.append(first + np.flatnonzero(own))
            owners.append(np.full(len(positions[-1]), index))
        return ops.iloc[np.concatenate(positions)].assign(instance=np.concatenate(owners))


def make_trace(ops: pd.DataFrame, ranges: pd.DataFrame, source: Path) -> Trace:
    """A trace from a reader's tables: typed, ordered by time, with depths computed; ``ranges`` come without them.

    Raises:
        TraceError: there are no operations at all.
    """
    if ops.empty:
        raise TraceError(f"{source}: the trace holds no operations")
    ops = ops[list(OP_COLUMNS)].astype(OP_COLUMNS).sort_values(["start", "end"], kind="stable", ignore_index=True)
    ranges = ranges.assign(length=ranges["end"] - ranges["start"])
    ranges = ranges.sort_values(["start", "length"], ascending=[True, False], kind="stable", ignore_index=True)
    ranges = ranges.assign(depth=depths(ranges))
    return Trace(ops, ranges[list(RANGE_COLUMNS)].astype(RANGE_COLUMNS), source)


def depths(intervals: pd.DataFrame) -> list[int]:
    """How many intervals of the same (pid, tid) enclose each, for intervals ordered by start, longest first."""
    open_until: dict[tuple[int, int], list[int]] = {}
    result = []
    for pid, tid, start, end in intervals[["pid", "tid", "start", "end"]].itertuples(index=False, name=None):
        stack = open_until.setdefault((pid, tid), [])
        while stack and stack[-1] <= start:
            stack.pop()
        result.append(len(stack))
        stack.append(end)
    return result


def require_kernels(trace: Trace) -> None:
    """Raise TraceError if the trace has no GPU kernels, as happens where two profilers contend for the device."""
    if not (trace.ops["kind"] == KERNEL).any():
        raise TraceError(
            f"{trace.source}: the trace of a CUDA run holds no kernels; is another profiler (nsys, ncu, "
            "torch.profiler) attached to the process?"
        )
