"""Questions to a trace. Answers are means over the recorded steps, unless a question takes one of ``single_steps``.

    times(trace, trace.instances("forward", inside="step"))    how long a range kept the device
    kernel_table(...)                                          what ran in it, how often, with which share
    class_times(...)                                           matmul against the rest
    limits(trace)                                              is the step bound by compute, memory or overhead?
    overlap(trace, step)                                       communication hidden behind compute, by stream
    slowdown(alone, beside, step)                              what communication costs the kernels it runs beside

Three durations of a range, because each misleads somewhere: *summed* adds up its operations, and counts time twice
where streams overlap; *unioned* is the time during which any of them runs; *projected* is from the first one's start to
the last one's end, and includes the gaps, as an event timer does.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from cs336_systems.profiling.ranges import STEP
from cs336_systems.profiling.traces.kernels import ATTENTION, CLASSES, COMMUNICATION, COPY, MATMUL, kernel_class
from cs336_systems.profiling.traces.tables import Trace

MS = 1e6
"""Nanoseconds in a millisecond."""

Intervals = npt.NDArray[np.int64]
"""A set of time as disjoint, ordered intervals in nanoseconds: (n, 2), each row a start and an end."""


def union(ops: pd.DataFrame) -> Intervals:
    """The time during which at least one of the operations runs (columns ``start`` and ``end``)."""
    ordered = ops[["start", "end"]].to_numpy(dtype=np.int64)
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    if not len(ordered):
        return ordered
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.concatenate([[True], ordered[1:, 0] > reached[:-1]])
    return np.stack([ordered[begins, 0], reached[np.concatenate([begins[1:], [True]])]], axis=1)


def length(intervals: Intervals) -> int:
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The time that lies in both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if start < end:
            found.append((start, end))
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(found, dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class RangeTimes:
    """Milliseconds (and counts) per step of one set of ranges."""

    calls: float
    host_ms: float
    """Between entering and leaving the range on its thread."""
    operations: float
    summed_ms: float
    unioned_ms: float
    projected_ms: float
    copies_ms: float
    """The summed time of copies and casts, which autocast puts into the ranges of what it casts for."""


def n_steps(trace: Trace) -> int:
    """Recorded steps, warm-up excluded.

    Raises:
        TraceError: the trace has no step.
    """
    return len(trace.instances(STEP))


def single_steps(trace: Trace) -> list[pd.DataFrame]:
    """The ranges of the recorded steps, each by itself; raises as ``n_steps``."""
    steps = trace.instances(STEP)
    return [steps.loc[[index]] for index in steps.index]


def times(trace: Trace, instances: pd.DataFrame) -> RangeTimes:
    """How long these ranges, instance by instance, kept the host and the device."""
    return _total(_by_instance(trace, instances), n_steps(trace))


def _by_instance(trace: Trace, instances: pd.DataFrame) -> pd.DataFrame:
    """One row per instance: host time, operations, the three durations, and copies among them, in nanoseconds."""
    ops = trace.operations(instances)
    ops["copied"] = (ops["end"] - ops["start"]).where(ops["name"].map(kernel_class) == COPY, 0)
    rows = instances.assign(host=instances["end"] - instances["start"])[["name", "depth", "host"]]
    held = ops.assign(length=ops["end"] - ops["start"]).groupby("instance")
    rows["operations"] = held.size()
    rows["summed"] = held["length"].sum()
    rows["unioned"] = pd.Series({index: length(union(group)) for index, group in held}, dtype=float)
    rows["projected"] = held["end"].max() - held["start"].min()
    rows["copies"] = held["copied"].sum()
    return rows.fillna(0)


def _total(rows: pd.DataFrame, steps: int) -> RangeTimes:
    names = ("host", "summed", "unioned", "projected", "copies")
    durations_ms = {f"{name}_ms": float(rows[name].sum()) / steps / MS for name in names}
    return RangeTimes(calls=len(rows) / steps, operations=float(rows["operations"].sum()) / steps, **durations_ms)


def range_table(trace: Trace) -> pd.DataFrame:
    """``times`` of every range name that occurs inside a step, in order of first appearance; the steps come first.

    Columns: range, depth (the least at which it occurs), and the fields of ``RangeTimes``.
    """
    windows = trace.instances(STEP)
    found = pd.concat([windows, trace.during(trace.ranges[trace.ranges["name"] != STEP], windows)])
    steps = len(windows)
    return pd.DataFrame(
        {"range": name, "depth": int(rows["depth"].min())} | vars(_total(rows, steps))
        for name, rows in _by_instance(trace, found).groupby("name", sort=False)
    )


def kernel_table(trace: Trace, *instances: pd.DataFrame) -> pd.DataFrame:
    """The operations of these ranges by name, most time first.

    Columns: name, kernel_class, count and total_ms (per step), mean_us, share_percent (of all these operations).
    """
    steps = n_steps(trace)
    ops = pd.concat([trace.operations(each) for each in instances])
    durations = (ops["end"] - ops["start"]).groupby(ops["name"]).agg(["count", "sum"])
    durations = durations.sort_values("sum", ascending=False, kind="stable")
    return pd.DataFrame(
        {
            "name": durations.index,
            "kernel_class": [kernel_class(name) for name in durations.index],
            "count": (durations["count"] / steps).to_numpy(),
            "total_ms": (durations["sum"] / steps / MS).to_numpy(),
            "mean_us": (durations["sum"] / durations["count"] / 1e3).to_numpy(),
            "share_percent": (100 * durations["sum"] / max(1, durations["sum"].sum())).to_numpy(),
        }
    )


def class_times(trace: Trace, *instances: pd.DataFrame) -> dict[str, float]:
    """Summed milliseconds per step of each kernel class that occurs in these ranges, in the order of ``CLASSES``."""
    table = kernel_table(trace, *instances)
    sums = table.groupby("kernel_class")["total_ms"].sum().to_dict()
    return {label: sums[label] for label in CLASSES if label in sums}


@dataclass(frozen=True)
class Limits:
    """Where the time of a step goes on its device, in milliseconds per step; the four parts add up to ``step_ms``."""

    step_ms: float
    compute_ms: float
    """Matmuls and fused attention run."""
    memory_ms: float
    """Only other kernels and copies run: each reads and writes more than it computes."""
    communication_ms: float
    """Only collectives run."""
    idle_ms: float
    """Nothing runs."""

    @property
    def idle_percent(self) -> float:
        return 100 * self.idle_ms / self.step_ms

    @property
    def verdict(self) -> str:
        """``compute``, ``memory``, ``communication`` or ``overhead``: the largest part."""
        parts = (self.compute_ms, self.memory_ms, self.communication_ms, self.idle_ms)
        return ("compute", "memory", "communication", "overhead")[parts.index(max(parts))]


def limits(trace: Trace, step_ms: float | None = None) -> Limits:
    """Split the step's time on its device, from the start of the ``step`` range to the end of its last operation.

    Args:
        step_ms: the step's time as measured without a profiler. If it is given, idle time is what is left of it beside
            the busy time; kernels run as long under a profiler as without, launches do not.
    """
    steps = single_steps(trace)
    traced = compute = local = busy = 0
    for step in steps:
        ops = trace.operations(step)
        if ops.empty:
            continue
        classes = ops["name"].map(kernel_class)
        compute += length(union(ops[classes.isin([MATMUL, ATTENTION])]))
        local += length(union(ops[classes != COMMUNICATION]))
        busy += length(union(ops))
        traced += int(ops["end"].max() - step["start"].iloc[0])
    scale = len(steps) * MS
    whole_ms = max(traced / scale if step_ms is None else step_ms, busy / scale)
    parts_ms = compute / scale, (local - compute) / scale, (busy - local) / scale
    return Limits(whole_ms, *parts_ms, idle_ms=whole_ms - busy / scale)


def overlap(trace: Trace, step: pd.DataFrame) -> tuple[float, float]:
    """Milliseconds of a step's communication, and of that beside other operations of its device; zeros without any."""
    ops = trace.operations(step)
    communicating = ops["name"].map(kernel_class) == COMMUNICATION
    total = hidden = 0
    for (device, _), group in ops[communicating].groupby(["device", "stream"]):
        busy = union(group)
        total += length(busy)
        hidden += length(intersection(busy, union(ops[~communicating & (ops["device"] == device)])))
    return total / MS, hidden / MS


def slowdown(alone: Trace, beside: Trace, step: pd.DataFrame) -> float:
    """Milliseconds by which kernels of a step of ``beside`` run longer than in the steps of ``alone``.

    The k-th kernel of a name in one step is taken for the k-th of that name in the other, so matmuls of different
    shapes are not mixed. Communication itself, and kernels that only one of the steps has, are left out.
    """
    sides = _numbered(alone, alone.instances(STEP)), _numbered(beside, step)
    paired = pd.merge(*sides, on=["name", "number"], suffixes=("_alone", "_beside"))
    return float((paired["ns_beside"] - paired["ns_alone"]).sum()) / MS


def _numbered(trace: Trace, steps: pd.DataFrame) -> pd.DataFrame:
    """Name, number among those of its name in a step, and mean nanoseconds of every kernel but communication."""
    ops = trace.operations(steps)
    ops = ops[ops["name"].map(kernel_class) != COMMUNICATION].sort_values("start", kind="stable")
    ops = ops.assign(number=ops.groupby(["instance", "name"]).cumcount(), ns=ops["end"] - ops["start"])
    numbered = ops.groupby(["name", "number"], as_index=False)["ns"].sum()
    return numbered.assign(ns=numbered["ns"] / len(steps))
