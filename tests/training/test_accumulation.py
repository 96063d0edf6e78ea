"""Micro-batches: their gradients are that of the whole batch, in one place, and are sent once."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.config import phase_of
from cs336_systems.distributed.process_group import Rank
from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.ranks import Parallel
from cs336_systems.training import TrainingCase, assemble, random_batch
from tests.distributed.checks import checks_of, on_each
from tests.training.shared import CONFIG, Shared, passes

WHOLE = TrainingCase.of(CONFIG, batch_size=12)


def in_parts(n: int, **fields: object) -> TrainingCase:
    return replace(WHOLE, batch_size=12 // n, accumulate=n, **fields)


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize(("n", "tied", "keep"), [(12, True, "autograd"), (3, False, "products")])
def test_gradients_and_loss_are_those_of_the_whole_batch(n, tied, keep):
    """Against fp64, within twice the error of the whole batch in fp32 and n roundings of the largest gradient."""
    size = replace(CONFIG, tie_embeddings=tied)
    whole, parts, oracle = (assemble(replace(case, size=size, keep=keep)) for case in (WHOLE, in_parts(n), WHOLE))
    oracle.model.double()
    batch = random_batch(WHOLE)
    exact, at_once, added = (passes(step, batch) for step in (oracle, whole, parts))
    largest = max(gradient.abs().max().item() for gradient in exact)
    budget = 2 * error(at_once, exact) + n * 2**-24 * largest
    print(f"whole {error(at_once, exact):.1e}, added {error(added, exact):.1e}, allowed {budget:.1e}")
    assert error(added, exact) <= budget
    assert parts.loss is not None and not parts.loss.requires_grad
    assert abs(parts.loss.item() - oracle.loss.item()) <= 2 * abs(whole.loss.item() - oracle.loss.item()) + n * 2**-22


def ignoring(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Targets that do not count: all of the first sequences, some of the fifth."""
    ids, targets = batch[0], batch[1].clone()
    targets[:3], targets[4, 5:] = IGNORED, IGNORED
    return ids, targets


def check_every_target_weighs_the_same(rank: Rank) -> None:
    for how, n in ((Parallel(), 1), (Parallel("bucketed"), 2)):
        batch, whole = ignoring(random_batch(WHOLE)), assemble(replace(WHOLE, keep="products"))
        parts = assemble(Shared.of(CONFIG, how=how, batch_size=2, keep="products"), rank)
        parts.accumulate = 6 // n
        parts.counted_over = None if n == 1 else dist.group.WORLD
        own = batch if n == 1 else tuple(each.chunk(2)[rank.rank] for each in batch)
        torch.testing.assert_close(passes(parts, own), passes(whole, batch), rtol=1e-4, atol=1e-7)
        mean = parts.loss.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, whole.loss)


test_on_two_ranks = on_each(2, checks_of(globals()))


def test_gradients_add_up_where_the_first_backward_put_them():
    step = assemble(in_parts(3))
    places = []
    for mode in ("forward", "backward"):
        for phase in step.phases(mode, *random_batch(WHOLE)).values():
            phase()
        assert all(parameter.grad is None for parameter in step.model.parameters())
    for name, phase in step.phases("step", *random_batch(WHOLE)).items():
        phase()
        if phase_of(name) == "backward":
            places.append([parameter.grad.data_ptr() for parameter in step.model.parameters()])
    assert places[0] == places[1] == places[2]
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_what_cannot_be_dealt_out_is_refused():
    ids, targets = random_batch(WHOLE)
    with pytest.raises(ValueError, match="11 sequences do not make 4 micro-batches of equally many"):
        assemble(in_parts(4)).phases("step", ids[:11], targets[:11])
    with pytest.raises(ValueError, match="accumulate must be positive, got 0"):
        assemble(replace(WHOLE, accumulate=0))
