"""Layouts: what their sizes multiply to, which ranks are neighbours, and which are refused."""

import pytest

from cs336_systems.costs.parallelism.layout import Layout


def test_sizes_multiply_and_neighbours_along_tensor_are_nearest():
    layout = Layout(replicas=2, shards=3, context=5, tensor=7, pipeline=11, zero=3)
    assert (layout.n_ranks, layout.data) == (2310, 6)
    strides = {name: layout.stride(name) for name in ("tensor", "context", "shard", "replica", "pipeline")}
    assert strides == {"tensor": 1, "context": 7, "shard": 35, "replica": 105, "pipeline": 210}


def test_states_are_divided_over_shards_and_context_from_level_1_on():
    assert (Layout(replicas=4, context=2).n_state_shards, Layout(replicas=4, context=2).n_copies) == (1, 8)
    divided = Layout(replicas=4, shards=8, context=2, tensor=8, zero=1)
    assert (divided.n_state_shards, divided.n_copies) == (16, 4)


def test_it_reads_as_a_few_words():
    layout = Layout(shards=4, tensor=2, pipeline=8, zero=1, schedule="interleaved", chunks=2, n_micro_batches=16)
    assert str(layout) == (
        "shard 4 x tensor 2 x pipeline 8, ZeRO 1, interleaved of 2 chunks, products, 16 micro-batches of 1"
    )
    assert str(Layout()) == "one GPU, ZeRO 0, products, 1 micro-batch of 1"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"tensor": 0}, "tensor must be positive, got 0"),
        ({"zero": 4, "shards": 2}, "levels 0, 1, 2, 3, got 4"),
        ({"shards": 2}, "2 shards are replicas"),
    ],
)
def test_impossible_ones_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        Layout(**how)
