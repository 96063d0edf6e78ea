"""Runs of two ranks whose weights come as late as they may: nothing in a run reads them before they are there.

Late is when somebody waits for them (``tests/distributed/late.py``), and buckets are so small that every block has
some. What does not wait reads what other ranks updated as it was a step before.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.pretraining import preparation
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation
from cs336_systems.pretraining.trainer import run_prepared
from cs336_systems.training import parallel
from tests.distributed.checks import spawn
from tests.distributed.late import late_updates
from tests.pretraining.trained import assert_equal_weights, losses_and_norms, options

SMALL_MB = 0.02
FP8 = {"matmul_dtype": "e4m3", "keep": "products"}
RUNS = {
    "evaluated and saved": {"evaluate_every": 2, "save_every": 2},
    "in fp8": FP8 | {"batch_size": 2},
    "tied": {},
    "gradients freed": {"zero": 2, "batch_size": 2},
}


def weights(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_small_buckets(*given, **named) -> ShardedOptimizer:
    return ShardedOptimizer(*given, **named | {"bucket_size_mb": SMALL_MB})


def run_each(rank, folder) -> dict[str, list]:
    """By run, with weights in time and late: those at the end, and how many modules were to wait after each step."""
    config_of, found = preparation.config_of, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "ShardedOptimizer", in_small_buckets)
        for name, changes in RUNS.items():
            tied = name == "tied"
            patch.setattr(preparation, "config_of", lambda *of, tied=tied: replace(config_of(*of), tie_embeddings=tied))
            plain = {"steps": 4, "batch_size": 4, "total_batch_tokens": 128, "zero": 1, "evaluate_every": None}
            plain |= {"save_every": None, "export": False}
            ends = []
            for late in (False, True):
                asked = options(folder, out=folder / f"{name} {late}", **plain | changes)
                prepared = preparation.prepare(asked, rank)
                on_their_way: list[int] = []
                prepared.step.optimizer.register_step_post_hook(
                    lambda own, *_, noted=on_their_way: noted.append(len(own._arrivals._under_way))
                )
                with late_updates() if late else nullcontext():
                    run_prepared(prepared, rank)
                ends.append((weights(prepared.step.model), on_their_way))
            found[name] = ends
    return found


@pytest.fixture(scope="module")
def ends(folder):
    return spawn(run_each, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_late_weights_change_nothing(folder, ends, name):
    for rank in ends:
        (in_time, _), (late, on_their_way) = rank[name]
        assert all(torch.equal(one, other) for one, other in zip(late, in_time, strict=True))
        assert on_their_way == [5] * 4  # embedding, two blocks, norm, head: each waits by itself
    told = [folder / f"{name} {late}" for late in (False, True)]
    assert losses_and_norms(told[1]) == losses_and_norms(told[0])
    in_time, late = (read_run(path / LOG) for path in told)
    assert [one.loss for one in late.all(Evaluation)] == [one.loss for one in in_time.all(Evaluation)]
    if "save_every" in RUNS[name]:
        assert_equal_weights(*told)
