"""Two ranks train what one does, however they divide the step, and take up each other's checkpoints."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining.loader import epoch_order
from cs336_systems.pretraining.trainer import train
from tests.distributed.checks import on_gpus, spawn
from tests.pretraining.trained import (
    EXPLODING,
    assert_equal_weights,
    losses_and_norms,
    options,
    train_each,
    write_dataset,
)

ZEROS = (0, 1, 2, 3)
SPLITS = {"alone": 8, "halves": 4, "quarters": 2, "eighths": 1}


@pytest.fixture(scope="module")
def trained(folder):
    """Runs by their folders' names: of one process, with batches dealt out in several ways; of two ranks; of both."""

    def of(name, **changes):
        rows = {"batch_size": 4, "total_batch_tokens": 128}
        return options(folder, out=folder / name, keep_last=9, **rows | changes)

    def first_half(name, **changes):
        return of(name, **changes, walltime=1e-9, save_every=1)

    with joined("cpu") as rank:
        for name, rows in SPLITS.items():
            train(of(name, batch_size=rows), rank)
        train(first_half("one-to-two"), rank)
    two = [of(f"two-{zero}", zero=zero) for zero in ZEROS]
    two += [of("copied", zero=3, gather_by="copies")]
    two += [of("one-to-two", zero=3), first_half("two-to-one", zero=3)]
    for zero, after in ((1, 3), (3, 0)):
        two += [first_half(f"around-{zero}", zero=zero), of(f"around-{zero}", zero=after)]
    two += [of(f"stopped-{zero}", zero=zero, **EXPLODING) for zero in (0, 3)]
    two += [first_half("same-3", zero=3), of("same-3", zero=3)]
    two += [of("two-tensor", tensor=2, keep="products"), first_half("mesh", context=2, zero=3, keep="products")]
    two += [of("mesh", tensor=2, keep="products")]
    stages = {"pipeline": 2, "batch_size": 2, "keep": "products"}
    two += [of("two-stages", pipeline_schedule="zb-h1", **stages)]
    two += [
        first_half("stages-to-ranks", **stages),
        of("stages-to-ranks", zero=1),
        first_half("stages-to-one", **stages),
    ]
    outcomes = spawn(train_each, 2, two)
    assert outcomes[0] == outcomes[1]
    for asked, outcome in zip(two, outcomes[0], strict=True):
        if asked.out.name.startswith("stopped"):
            assert re.match(r"step 1: loss \S+, norm ", outcome), outcome
            continue
        assert (outcome.reason, outcome.steps < 10) == (("walltime", True) if asked.walltime else ("done", False))
    with joined("cpu") as rank:
        train(of("two-to-one"), rank)
        train(of("stages-to-one"), rank)
    return folder


def values(folder):
    found = torch.tensor(losses_and_norms(folder), dtype=torch.float64)
    assert found.shape == (10, 2)
    return found


@pytest.fixture(scope="module")
def budget(trained):
    """What another order of addition does to losses and norms of the same steps, (10, 2): the most of three, and such
    a step's growth, as runs drift apart."""
    runs = [values(trained / name) for name in SPLITS]
    apart = torch.stack([(one - other).abs() for one, other in pairwise([*runs, runs[0]])]).amax(0)
    return 4 * apart.cummax(0).values + 2**-22 * runs[0]


@pytest.mark.slow
def test_ranks_and_resharding_change_no_more_than_another_order_of_addition(trained, budget):
    for name in (
        *(f"two-{zero}" for zero in ZEROS),
        "around-1",
        "around-3",
        "one-to-two",
        "two-to-one",
        "two-tensor",
        "mesh",
        "two-stages",
        "stages-to-ranks",
        "stages-to-one",
    ):
        apart = (values(trained / name) - values(trained / "alone")).abs()
        assert (apart <= budget).all(), (name, apart, budget)
    losses, norms = torch.stack([values(trained / f"two-{zero}") for zero in ZEROS]).unbind(-1)
    # Nothing is clipped, so losses are the same bits; norms, sums over shards, are rounded in another order.
    assert (norms < options(trained).clip).all()
    assert (losses == losses[0]).all()
    assert ((norms - norms[0]).abs() <= budget[:, 1]).all()
    # One micro-batch a step; of several each one is averaged by itself.
    assert losses_and_norms(trained / "two-2") == losses_and_norms(trained / "two-1")


@pytest.mark.slow
def test_all_ranks_stop_at_a_step_that_is_not_finite(trained):
    for zero in (0, 3):
        assert [path.name for path in complete_checkpoints(trained / f"stopped-{zero}")] == ["step-00000001"]


@pytest.mark.slow
def test_the_same_bits_in_two_commands_and_by_copies(trained):
    for one, other in (("two-3", "same-3"), ("two-3", "copied")):
        assert losses_and_norms(trained / other) == losses_and_norms(trained / one)
        assert_equal_weights(trained / one, trained / other)


@pytest.mark.slow
def test_a_fault_of_one_rank_is_said_by_it_and_ranks_that_are_unlike_by_all(tmp_path):
    """The second of two has the broken token, in its half of the third batch."""
    write_dataset(tmp_path / "data")
    other = np.memmap(write_dataset(tmp_path / "other") / "train-00000.bin", "<u4", "r+", offset=1024)
    other[:] = other[::-1].copy()
    tokens = np.memmap(tmp_path / "data" / "train-00000.bin", "<u4", "r+", offset=1024)
    tokens[16 * epoch_order(249, seed=0, epoch=0)[2 * 8 + 5] + 5] = 77_777
    with pytest.raises(Exception, match="rank 1: token 77777 .* 320: .*train-00000.bin"):
        spawn(train_unlike, 2, tmp_path)


def train_unlike(rank, folder):
    """What no rank alone may have is refused by all, before anything is written; then a run, whose data are broken."""
    asked = options(folder, batch_size=4, evaluate_every=None)
    for changes, named in (
        ({"learning_rate": 0.5}, "--learning-rate is 0.01 on rank 0 and 0.5 on rank 1"),
        ({"steps": 11}, "--steps is 10 on rank 0 and 11 on rank 1"),
        ({"betas": (0.5, 2.0)}, "--betas must lie"),
        ({"data": folder / "other"}, "the checksum of tokens to learn is "),
        ({"data": folder / "nowhere"}, "nowhere is no folder"),
        ({"data": None}, "whether there is --data is True on rank 0 and False on rank 1"),
    ):
        with pytest.raises(ValueError) as refusal:
            train(replace(asked, **changes) if rank.rank else asked, rank)
        assert named in str(refusal.value) and "\n" not in str(refusal.value)
        assert not asked.out.exists()
    train(replace(asked, walltime=900.0) if rank.rank else asked, rank)


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_gpus_train_what_one_does(world_size, device, tmp_path):
    """In bf16, with fused kernels, over NCCL; within what another order of addition does, and a rounding to bf16."""
    write_dataset(tmp_path / "data")
    like = {"device": device, "dtype": "bf16", "optimizer": "fused", "kernels": "fused", "attention": "flash"}

    def of(name, **changes):
        rows = {"batch_size": 8 // world_size, "total_batch_tokens": 128}
        return options(tmp_path, out=tmp_path / name, **like | rows | changes)

    spawn(train_each, 1, [of(name, batch_size=rows) for name, rows in SPLITS.items()], device=device)
    shared = [of(f"zero-{zero}", zero=zero, save_every=4, **end) for zero in ZEROS for end in ({"walltime": 1e-9}, {})]
    outcomes = spawn(train_each, world_size, shared, device=device)
    assert [outcome.reason for outcome in outcomes[0]] == ["walltime", "done"] * 4
    runs = [values(tmp_path / name) for name in SPLITS]
    apart = torch.stack([(one - other).abs() for one, other in pairwise([*runs, runs[0]])]).amax(0).cummax(0).values
    for zero in ZEROS:
        off = (values(tmp_path / f"zero-{zero}") - runs[0]).abs()
        assert (off <= 4 * apart + 2**-8 * runs[0]).all(), (zero, off, apart)
