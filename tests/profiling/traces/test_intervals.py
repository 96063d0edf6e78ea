"""Sets of time, against sets of integers."""

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.profiling.traces.intervals import Intervals, gaps, intersection, length, union

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 15)), max_size=12)


def frame(pairs: list[tuple[int, int]]) -> pd.DataFrame:
    return pd.DataFrame([(start, start + size) for start, size in pairs], columns=["start", "end"], dtype=np.int64)


def instants(intervals: Intervals) -> set[int]:
    return {t for start, end in intervals for t in range(start, end)}


@given(spans)
def test_union_covers_each_instant_once(pairs):
    covered = union(frame(pairs))
    assert instants(covered) == {t for start, size in pairs for t in range(start, start + size)}
    assert length(covered) == len(instants(covered))
    assert (covered[1:, 0] > covered[:-1, 1]).all()


@given(spans, spans)
def test_intersection_is_what_both_cover(a, b):
    assert instants(intersection(union(frame(a)), union(frame(b)))) == instants(union(frame(a))) & instants(
        union(frame(b))
    )


@given(spans)
def test_gaps_are_the_rest(pairs):
    covered = union(frame(pairs))
    if len(covered):
        whole = range(covered[0, 0], covered[-1, 1])
        assert instants(gaps(covered)) == set(whole) - instants(covered)


def test_nothing_has_no_length():
    assert length(union(frame([]))) == 0
