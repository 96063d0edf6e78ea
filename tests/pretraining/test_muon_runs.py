"""Runs with Muon: two ranks, of which each owns some matrices, train what one does; a run resumes to the bit."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.pretraining.checkpoint import load_weights
from cs336_systems.pretraining.trainer import train
from tests.distributed.checks import on_ranks
from tests.pretraining.trained import losses_and_norms, options, train_each, write_dataset
from tests.training.test_muon import HYPERPARAMETERS, class_of, groups, make, parameters, run, same_bits

SPLITS = {"alone": 8, "halves": 4}
"""Sequences of a micro-batch, of the eight of a step."""


def owners_and_one(rank: Rank) -> None:
    for kind, dtype, n_steps in (("torch", torch.float32, 10), ("fused", torch.bfloat16, 2)):
        alone, shared = parameters(dtype), parameters(dtype)
        run(make(kind, alone), alone, range(n_steps))
        cls, own = class_of(kind)
        optimizer = ShardedOptimizer(groups(shared), cls, bucket_size_mb=0.002, **HYPERPARAMETERS | own)
        assert 0 < len(optimizer.pieces) < len(shared)
        run(optimizer, shared, range(n_steps))
        assert same_bits(alone, shared), kind


def test_owners_update_as_one_process_does_in_its_bits():
    on_ranks(owners_and_one, 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs by their folders' names, of one process and of two ranks; those that resume began with one step."""
    folder = tmp_path_factory.mktemp("muon")
    write_dataset(folder / "data")

    def of(name, **changes):
        small = {"optimizer": "muon", "clip": 0.5, "evaluate_every": None, "save_every": 4, "export": False}
        rows = {"batch_size": 4, "total_batch_tokens": 128, "keep_last": 9}
        return options(folder, out=folder / name, **small | rows | changes)

    def half(name, **changes):
        return of(name, walltime=1e-9, save_every=1, **changes)

    with joined("cpu") as rank:
        for name, rows in SPLITS.items():
            train(of(name, batch_size=rows), rank)
        train_each(rank, [half("resumed", batch_size=8), of("resumed", batch_size=8)])
        for changes, said in (
            ({"optimizer": "torch-fused"}, "is a checkpoint of another optimizer"),
            ({"offload": ("m",)}, "offload m needs optimizer fused, got muon"),
            ({"device_gib": 1.0, "host_gib": 1.0}, "--optimizer muon does not go together with --device-gib"),
            ({"agree": "every-step", "replicas": 2}, "--agree every-step does not go together with --optimizer muon"),
        ):
            with pytest.raises(ValueError, match=said):
                train(replace(of("alone", batch_size=8, steps=20), **changes), rank)
    two = [of("two-0"), of("two-1", zero=1), half("two-resumed", zero=1), of("two-resumed", zero=0)]
    two += [of("stages", zero=1, pipeline=2, batch_size=2, keep="products")]
    on_ranks(train_each, 2, two)
    said = on_ranks(refused, 2, of("refused", zero=2))
    assert all("optimizer muon updates whole matrices" in each and "\n" not in each for each in said), said
    return folder


def refused(rank, asked):
    with pytest.raises(ValueError) as refusal:
        train(asked, rank)
    return str(refusal.value)


@pytest.mark.slow
def test_ranks_change_no_more_than_another_order_of_addition(trained):
    found = {
        name: torch.tensor(losses_and_norms(trained / name), dtype=torch.float64)
        for name in (*SPLITS, "two-0", "two-1", "stages")
    }
    alone = found["alone"]
    budget = 8 * (found["halves"] - alone).abs().cummax(0).values + 2**-22 * alone
    for name in ("two-0", "two-1", "stages"):
        off = (found[name] - alone).abs()
        assert (off <= budget).all(), (name, off, budget)
    assert (found["alone"][:, 1] > 0.5).any()  # some gradients are clipped
    assert found["alone"][-1, 0] < found["alone"][0, 0] - 0.3


@pytest.mark.slow
def test_the_same_bits_where_matrices_have_owners_and_after_a_resume(trained):
    for one, other in (("two-0", "two-1"), ("two-0", "two-resumed"), ("alone", "resumed")):
        assert losses_and_norms(trained / other) == losses_and_norms(trained / one)
        whole, found = (load_weights(trained / name).weights for name in (one, other))
        assert all(torch.equal(tensor, found[name]) for name, tensor in whole.items()), other
