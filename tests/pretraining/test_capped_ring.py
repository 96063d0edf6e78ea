"""Runs of a ring of ranks under caps on memory: to the bit the run of one rank, and resumed from its checkpoints."""

import re
from dataclasses import replace

import pytest
import torch

from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining import capped
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation
from cs336_systems.pretraining.trainer import train
from tests.distributed.checks import on_ranks
from tests.pretraining.checkpointed import LLAMA, export_model
from tests.pretraining.trained import (
    assert_equal_weights,
    copy_until,
    losses_and_norms,
    options,
    refused,
    said_by,
    write_dataset,
)

CHANGES = {"context_length": 32, "batch_size": 2, "chunk": 16, "device_gib": 0.5, "host_gib": 1.0}


@pytest.fixture(autouse=True)
def short_searches_and_one_thread(monkeypatch):
    n_threads = torch.get_num_threads()
    monkeypatch.setattr(capped, "EFFORT", 2000)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def in_a_ring(rank, run):
    torch.set_num_threads(1)
    capped.EFFORT = 2000
    return train(run, rank).first_step


@pytest.mark.parametrize("tied", [False, True])
def test_a_ring_goes_on_with_the_run_of_one_rank_and_one_rank_with_the_rings(tmp_path, tied):
    """Ten steps of one rank; of another copy the second half by a ring of two; and of the ring's its end by one."""
    write_dataset(tmp_path / "data")
    export_model(tmp_path / "hf", replace(LLAMA, n_layers=3, tie_embeddings=tied))
    made = {"init": tmp_path / "hf", "save_every": 2, "keep_last": 9, **CHANGES}
    one, ring, back = (options(tmp_path, out=tmp_path / name, **made) for name in ("one", "ring", "back"))
    with joined("cpu") as rank:
        train(one, rank)
    for source, copy, step in ((one, ring, 4), (ring, back, 8)):
        copy_until(step, source.out, copy.out)
        if copy is ring:
            assert on_ranks(in_a_ring, 2, ring) == [4, 4]
        else:
            with joined("cpu") as rank:
                assert train(back, rank).first_step == 8
        assert losses_and_norms(copy.out) == losses_and_norms(one.out)
        assert_equal_weights(copy.out, one.out)
    ends = [read_run(run.out / LOG).last(Evaluation) for run in (one, ring)]
    assert len({(each.step, each.loss, each.tokens) for each in ends}) == 1
    said = "\n".join(said_by(ring.out))
    assert re.search(r"Of 2 layers of rank 0", said)
    assert "Ranks hand activations on by messages of gloo." in said


def test_a_ring_begins_with_the_weights_of_one_rank(tmp_path):
    """Random ones, of which each rank keeps its own; more ranks than layers are refused."""
    write_dataset(tmp_path / "data")
    run = options(tmp_path, size="tiny", steps=3, evaluate_every=None, save_every=None, export=False, **CHANGES)
    with joined("cpu") as rank:
        train(replace(run, out=tmp_path / "one"), rank)
    on_ranks(in_a_ring, 2, replace(run, out=tmp_path / "two"))
    first = [losses_and_norms(tmp_path / name)[0] for name in ("one", "two")]
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def test_more_ranks_than_layers_are_refused(tmp_path):
    write_dataset(tmp_path / "data")
    said = on_ranks(refused, 3, options(tmp_path, size="tiny", **CHANGES))
    assert all("2 layers are too few for a ring of 3 ranks" in each for each in said)
