"""Two ranks train what one does, however they divide the step, and take up each other's checkpoints."""

import re
from itertools import pairwise

import pytest
import torch

from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining.checkpoint import load_weights
from cs336_systems.pretraining.trainer import train
from tests.distributed.checks import on_gpus, spawn
from tests.pretraining.trained import EXPLODING, losses_and_norms, options, train_each, write_dataset

ZEROS = (0, 1, 2, 3)
SPLITS = {"alone": 8, "halves": 4, "quarters": 2, "eighths": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs by their folders' names: of one process, with batches dealt out in several ways; of two ranks; of both."""
    folder = tmp_path_factory.mktemp("ranks")
    write_dataset(folder / "data")

    def of(name, **changes):
        rows = {"batch_size": 4, "total_batch_tokens": 128}
        return options(folder, out=folder / name, keep_last=9, **rows | changes)

    def first_half(name, **changes):
        return of(name, **changes, walltime=1e-9, save_every=1)

    with joined("cpu") as rank:
        for name, rows in SPLITS.items():
            train(of(name, batch_size=rows), rank)
        for zero in ZEROS:
            train(first_half(f"one-to-two-{zero}"), rank)
    two = [of(f"two-{zero}", zero=zero) for zero in ZEROS]
    two += [of("copied", zero=3, gather_by="copies")]
    two += [of(f"one-to-two-{zero}", zero=zero) for zero in ZEROS]
    two += [first_half(f"two-to-one-{zero}", zero=zero) for zero in ZEROS]
    two += [first_half(f"around-{zero}", zero=zero) for zero in ZEROS]
    two += [of(f"around-{zero}", zero=after) for zero, after in zip(ZEROS, (1, 2, 3, 0), strict=True)]
    two += [first_half(f"again-{zero}", zero=zero) for zero in ZEROS]
    two += [of(f"again-{zero}", zero=zero) for zero in ZEROS]
    two += [of(f"stopped-{zero}", zero=zero, **EXPLODING) for zero in ZEROS]
    two += [of(f"skipping-{zero}", zero=zero, **EXPLODING, skip_nonfinite=True) for zero in ZEROS]
    outcomes = spawn(train_each, 2, two, timeout_s=120)
    assert outcomes[0] == outcomes[1]
    for asked, outcome in zip(two, outcomes[0], strict=True):
        if asked.out.name.startswith("stopped"):
            assert re.match(r"step 1: loss \S+, of ranks \S+ and \S+, norm ", outcome), outcome
            continue
        assert (outcome.reason, outcome.steps < 10) == (("walltime", True) if asked.walltime else ("done", False))
    with joined("cpu") as rank:
        for zero in ZEROS:
            train(of(f"two-to-one-{zero}"), rank)
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
@pytest.mark.parametrize("kind", ["two", "one-to-two", "two-to-one", "around"])
@pytest.mark.parametrize("zero", ZEROS)
def test_ranks_and_resharding_change_no_more_than_another_order_of_addition(trained, budget, kind, zero):
    apart = (values(trained / f"{kind}-{zero}") - values(trained / "alone")).abs()
    assert (apart <= budget).all(), (apart, budget)


@pytest.mark.slow
def test_losses_of_all_levels_are_the_same_bits(trained, budget):
    """As long as nothing is clipped: norms, sums over shards, are rounded in another order."""
    losses, norms = torch.stack([values(trained / f"two-{zero}") for zero in ZEROS]).unbind(-1)
    assert (norms < options(trained).clip).all()
    assert (losses == losses[0]).all()
    assert ((norms - norms[0]).abs() <= budget[:, 1]).all()


@pytest.mark.slow
def test_gradients_that_are_freed_are_the_same_numbers(trained):
    """One micro-batch a step; of several each one is averaged by itself."""
    assert losses_and_norms(trained / "two-2") == losses_and_norms(trained / "two-1")


@pytest.mark.slow
@pytest.mark.parametrize("zero", ZEROS)
def test_no_step_that_is_not_finite_changes_anything_on_any_rank(trained, zero):
    assert [path.name for path in complete_checkpoints(trained / f"stopped-{zero}")] == ["step-00000001"]
    before = load_weights(trained / f"stopped-{zero}").weights
    after = load_weights(trained / f"skipping-{zero}")
    assert after.step == 10
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("zero", ZEROS)
def test_ranks_that_resume_are_those_that_were_not_interrupted(trained, zero):
    assert losses_and_norms(trained / f"again-{zero}") == losses_and_norms(trained / f"two-{zero}")
    whole, again = load_weights(trained / f"two-{zero}"), load_weights(trained / f"again-{zero}")
    assert whole.step == again.step == 10
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, again.weights[name]), name


@pytest.mark.slow
def test_weights_that_are_copied_are_those_that_collectives_gather(trained):
    assert losses_and_norms(trained / "copied") == losses_and_norms(trained / "two-3")
    gathered, copied = (load_weights(trained / name).weights for name in ("two-3", "copied"))
    for name, tensor in gathered.items():
        assert torch.equal(tensor, copied[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_gpus_train_what_one_does(world_size, device, tmp_path):
    """In bf16, with fused kernels, over NCCL; within what another order of addition does, and a rounding to bf16."""
    write_dataset(tmp_path / "data")
    like = {"device": device, "dtype": "bf16", "optimizer": "fused", "kernels": "fused", "attention": "flash"}

    def of(name, **changes):
        rows = {"batch_size": 8 // world_size, "total_batch_tokens": 128}
        return options(tmp_path, out=tmp_path / name, **like | rows | changes)

    spawn(train_each, 1, [of(name, batch_size=rows) for name, rows in SPLITS.items()], device=device, timeout_s=60)
    shared = [of(f"zero-{zero}", zero=zero, save_every=4, **end) for zero in ZEROS for end in ({"walltime": 1e-9}, {})]
    outcomes = spawn(train_each, world_size, shared, device=device, timeout_s=60)
    assert [outcome.reason for outcome in outcomes[0]] == ["walltime", "done"] * 4
    runs = [values(tmp_path / name) for name in SPLITS]
    apart = torch.stack([(one - other).abs() for one, other in pairwise([*runs, runs[0]])]).amax(0).cummax(0).values
    for zero in ZEROS:
        off = (values(tmp_path / f"zero-{zero}") - runs[0]).abs()
        assert (off <= 4 * apart + 2**-8 * runs[0]).all(), (zero, off, apart)
