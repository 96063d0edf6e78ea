"""Sets of time as disjoint, ordered intervals: an (n, 2) array of nanoseconds, each row a start and an end."""

import numpy as np
import numpy.typing as npt
import pandas as pd

Intervals = npt.NDArray[np.int64]


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
    """Nanoseconds in all."""
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


def gaps(intervals: Intervals) -> Intervals:
    """The time between the intervals."""
    return np.stack([intervals[:-1, 1], intervals[1:, 0]], axis=1)
