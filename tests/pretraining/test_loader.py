"""The loader: each epoch once, the same global batches on any number of ranks, and resumed as if never stopped."""

import itertools
from contextlib import nullcontext
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from cs336_systems.pretraining.dataset import TokenFile, TokenStream
from cs336_systems.pretraining.loader import Loader, Sequences, epoch_order, evaluation_batches, fingerprint
from tests.pretraining.trained import counting

SHAPES = st.tuples(st.integers(1, 7), st.integers(1, 25))
"""Context length and number of sequences."""


def make(stream, context_length, batch_size, device="cpu", vocab_size=2**32, **options):
    return Loader(Sequences(stream, context_length, vocab_size, device), batch_size, **options)


def take(loader, n_batches):
    """The first token of each sequence, batch by batch, after a check that inputs and targets belong together."""
    batches = []
    for inputs, targets in itertools.islice(loader, n_batches):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert torch.equal(inputs + 1, targets)  # of tokens that count up
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(inputs.shape[1]))
        batches.append(inputs[:, 0].tolist())
    return batches


@given(SHAPES, st.data())
@settings(deadline=None, max_examples=25)
def test_an_epoch_is_every_sequence_once_and_batches_run_on_into_the_next(shape, data):
    context_length, n_sequences = shape
    tail = data.draw(st.integers(0, context_length - 1))
    n_tokens = n_sequences * context_length + 1 + tail
    stream = counting(n_tokens, *data.draw(st.lists(st.integers(0, n_tokens), max_size=4)))
    batch_size, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2**32 - 1))
    with make(stream, context_length, batch_size, seed=seed) as loader:
        firsts = list(itertools.chain(*take(loader, -(-3 * n_sequences // batch_size))))
    for epoch in range(3):
        order = firsts[epoch * n_sequences : (epoch + 1) * n_sequences]
        assert sorted(order) == [number * context_length for number in range(n_sequences)]
        assert order == (epoch_order(n_sequences, seed, epoch) * context_length).tolist()


@given(SHAPES, st.integers(1, 3), st.sampled_from([1, 2, 3, 6]), st.integers(0, 5))
@settings(deadline=None, max_examples=25)
def test_ranks_share_what_one_rank_has(shape, rows, world_size, seed):
    context_length, n_sequences = shape
    stream = counting(n_sequences * context_length + 1)
    with make(stream, context_length, rows * 6, seed=seed) as loader:
        alone = take(loader, 4)
    shares = []
    for rank in range(world_size):
        with make(stream, context_length, rows * 6, rank=rank, world_size=world_size, seed=seed) as loader:
            shares.append(take(loader, 4))
    assert [list(itertools.chain(*batch)) for batch in zip(*shares, strict=True)] == alone


@given(SHAPES, st.integers(0, 12), st.integers(1, 4), st.sampled_from([(1, 2), (2, 1), (1, 1), (2, 2)]))
@settings(deadline=None, max_examples=25)
def test_a_run_continues_anywhere_with_another_batch_and_world(shape, at, rows, worlds):
    context_length, n_sequences = shape
    before, after = worlds
    stream = counting(n_sequences * context_length + 1)
    with make(stream, context_length, 1, seed=3) as loader:
        uninterrupted = list(itertools.chain(*take(loader, 2 * at + 4 * rows)))
    with make(stream, context_length, 2, seed=3, world_size=before, rank=before - 1) as loader:
        take(loader, at)
        state = loader.state_dict()
    continued = []
    for rank in range(after):
        with make(stream, context_length, 2 * rows, seed=3, world_size=after, rank=rank) as loader:
            take(loader, 1)  # to be forgotten, with what it has read ahead
            loader.load_state_dict(state)
            continued.append(take(loader, 2))
    batches = [list(itertools.chain(*batch)) for batch in zip(*continued, strict=True)]
    assert list(itertools.chain(*batches)) == uninterrupted[2 * at :]


def test_the_state_is_where_the_next_batch_begins_and_that_of_another_run_is_refused():
    with make(counting(101), 10, 4, seed=5) as loader, make(counting(101), 10, 4, seed=5) as other:
        place = {"epoch": 0, "position": 0, "seed": 5, "context_length": 10, "n_tokens": 101}
        assert loader.state_dict() == place | {"fingerprint": fingerprint(counting(101, 40))}
        assert epoch_order(8, 0, 0).tolist() == [3, 7, 4, 0, 2, 6, 5, 1], "another would end every resumption"
        take(loader, 2)
        assert loader.state_dict()["position"] == 8
        take(loader, 1)
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 2)
        for name in ("seed", "context_length", "n_tokens"):
            with pytest.raises(ValueError, match=f"^{name}: 5,000 in the data of the saved run, "):
                loader.load_state_dict(loader.state_dict() | {name: 5000})
        assert take(loader, 1) == take(other, 4)[3:]
        other.load_state_dict(place)  # as it was saved before there were fingerprints


def test_other_tokens_of_the_same_number_are_refused_and_a_mended_token_is_not():
    state = {"epoch": 0, "position": 3, "seed": 0, "context_length": 10, "n_tokens": 100_001}
    mended, other = np.arange(100_001, dtype=np.uint32), np.arange(1, 100_002, dtype=np.uint32)
    mended[50_000] = 7
    for tokens, refused in ((mended, False), (other, True)):
        stream = TokenStream([TokenFile(Path("mine.bin"), 1, tokens)])
        with make(stream, 10, 4) as loader:
            saved = state | {"fingerprint": fingerprint(counting(100_001, 70_000))}
            with pytest.raises(ValueError, match=r"mine\.bin") if refused else nullcontext():
                loader.load_state_dict(saved)
            assert loader.state_dict()["position"] == (0 if refused else 3)


def test_what_cannot_be_dealt_out_is_refused():
    with pytest.raises(ValueError, match="0.bin has 100 tokens, .* 101"):
        Sequences(counting(100), 100, 1000)
    with pytest.raises(ValueError, match="6 .* 4 ranks"):
        make(counting(100), 10, 6, world_size=4)
    with pytest.raises(ValueError, match=r"0.bin has a vocabulary of 4,096, the model one of 257"):
        Sequences(counting(50, vocab_size=4096), 10, 257)


def test_a_token_beyond_the_vocabulary_is_found_before_the_model_sees_it():
    """The ids are 0 to 100, so 100 is the first that a vocabulary of 100 does not have."""
    stream = counting(101, 40, 70)
    message = "token 100 is beyond the model's vocabulary of 100: 2.bin, position 30"
    with make(stream, 10, 10, vocab_size=100) as loader:
        for _ in range(2):  # asked a second time, it says so again
            with pytest.raises(ValueError, match=message):
                next(loader)
        assert loader.state_dict()["position"] == 0
    with make(stream, 10, 10, vocab_size=101) as loader:
        next(loader)


@given(SHAPES, st.integers(1, 5), st.integers(1, 6), st.none() | st.integers(1, 30))
@settings(deadline=None, max_examples=25)
def test_evaluation_covers_each_sequence_once_in_equal_batches_on_all_ranks(shape, batch_size, world_size, limit):
    context_length, n_sequences = shape
    with torch.device("meta"):  # batches come from memory of the host whatever the default device is
        sequences = Sequences(counting(n_sequences * context_length + 1), context_length, 2**32)
        sizes, counted = set(), np.zeros(n_sequences)
        for rank in range(world_size):
            own = []
            for inputs, targets, count in evaluation_batches(
                sequences, batch_size, rank=rank, world_size=world_size, limit=limit
            ):
                assert torch.equal(inputs + 1, targets)
                assert len(inputs) <= batch_size
                counted[inputs[:, 0] // context_length] += count / len(inputs)
                own.append(len(inputs))
            sizes.add(tuple(own))
    assert len(sizes) == 1
    expected = np.arange(n_sequences) < (limit or n_sequences)
    np.testing.assert_allclose(counted, expected)


@pytest.mark.gpu
def test_batches_reach_the_gpu_without_a_wait():
    stream = counting(100_001)
    with make(stream, 100, 64, device="cuda") as ours, make(stream, 100, 64) as theirs:
        next(ours)
        next(theirs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [next(ours) for _ in range(40)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for (inputs, targets), (expected_inputs, expected_targets) in zip(found, theirs, strict=False):
            assert torch.equal(inputs.cpu(), expected_inputs)
            assert torch.equal(targets.cpu(), expected_targets)
