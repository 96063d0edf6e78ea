"""Bytes of sharded optimizer state by hand, and what must hold of any list of tensors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.costs.sharding import (
    ALIGNMENT_BYTES,
    FORMS,
    greedy_partition,
    link_bytes_per_step,
    plan_buckets,
    state_bytes_by_rank,
)

SIZES = st.lists(st.integers(0, 5000).map(lambda n: 4 * n), min_size=1, max_size=30)
WORLDS = st.integers(1, 9)


def test_the_largest_goes_first_to_the_emptiest_rank():
    assert greedy_partition([3, 10, 4, 4], 2) == [1, 0, 1, 1]  # loads 10 and 11
    assert greedy_partition([5, 5, 5], 3) == [0, 1, 2]
    assert greedy_partition([2], 2, loads=[1, 0]) == [1]
    assert greedy_partition([], 2) == []


@given(SIZES, WORLDS)
def test_no_rank_is_more_than_the_largest_tensor_above_the_mean(sizes, world_size):
    loads = state_bytes_by_rank("owned", sizes, world_size, per_parameter=1)
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / world_size + max(sizes)


def test_buckets_by_hand():
    """Tensors begin at multiples of 128 bytes; the last bucket's 4 bytes are rounded up to two aligned shards."""
    first, second, third = plan_buckets([100, 300, 5000, 4], 512, shards=2)
    assert (first.members, first.offsets, first.n_bytes) == ((0, 1), (0, 128), 512)
    assert (second.members, second.offsets, second.n_bytes) == ((2,), (0,), 5120)
    assert (third.members, third.offsets, third.n_bytes) == ((3,), (0,), 256)
    assert first.pieces([100, 300], 2) == [[(0, 0, 100)], [(0, 0, 128), (1, 128, 300)]]


@given(SIZES, WORLDS, st.integers(1, 20_000))
def test_every_byte_is_in_one_piece(sizes, world_size, bucket_bytes):
    plans = plan_buckets(sizes, bucket_bytes, world_size)
    assert [member for plan in plans for member in plan.members] == list(range(len(sizes)))
    for plan in plans:
        assert plan.n_bytes % (world_size * ALIGNMENT_BYTES) == 0
        for offset, member in zip(plan.offsets, plan.members, strict=True):
            assert offset % ALIGNMENT_BYTES == 0
            assert offset + sizes[member] <= plan.n_bytes
        for member, pieces in zip(plan.members, plan.pieces([sizes[m] for m in plan.members], world_size), strict=True):
            ends = [0] + [stop for _, _, stop in pieces]
            assert [start for _, start, _ in pieces] == ends[:-1]
            assert ends[-1] == sizes[member]
            assert [rank for rank, _, _ in pieces] == sorted({rank for rank, _, _ in pieces})
    held = state_bytes_by_rank("scattered", sizes, world_size, bucket_bytes=bucket_bytes)
    assert sum(held) == 2 * sum(sizes)


@pytest.mark.parametrize(
    ("world_size", "expected"), [(1, (0, 0, 0)), (2, (100, 200, 100)), (4, (150, 250, 150)), (100, (198, 298, 198))]
)
def test_bytes_per_link(world_size, expected):
    assert tuple(link_bytes_per_step(form, 100, world_size) for form in FORMS) == pytest.approx(expected)


def test_unknown_forms_are_refused():
    for call in (lambda: state_bytes_by_rank("zero", [4], 2), lambda: link_bytes_per_step("zero", 4, 2)):
        with pytest.raises(ValueError, match="'zero'"):
            call()
