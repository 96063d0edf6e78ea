"""An optimizer that steps under backward leaves the bits of one that steps after it, and no gradients in between."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.ranks import Parallel
from cs336_systems.training import assemble, random_batch
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.step import TrainStep
from tests.distributed.checks import checks_of, on_each
from tests.kernels.interpreter import interpret_without_gpu
from tests.training.shared import CONFIG, Shared

TIED = replace(CONFIG, tie_embeddings=True)
STEPS = 3


UNDER = Parallel("fsdp", update="under-backward")
CASES = (
    Shared.of(CONFIG, how=UNDER, optimizer="torch-fused"),
    Shared.of(CONFIG, how=UNDER, dtype="bf16", keep="products-residual"),
    Shared.of(TIED, how=UNDER, dtype="bf16", accumulate=2),
    Shared.of(TIED, how=UNDER, keep="input", checkpoint="none"),
    Shared.of(CONFIG, how=UNDER, checkpoint="full"),
    Shared.of(TIED, how=replace(UNDER, context=2), keep="products"),
    Shared.of(replace(TIED, vocab_size=98), how=replace(UNDER, tensor=2), keep="products"),
)
PLAIN = Shared.of(CONFIG, how=UNDER)


def trained(case: Shared, rank: Rank) -> tuple[list[float], list[Tensor]]:
    step = assemble(case, rank)
    losses = [step(*random_batch(replace(case, seed=seed), rank)).item() for seed in range(STEPS)]
    assert isinstance(step.model, FSDP)
    return losses, list(step.model.gather_full_params().values())


def check_same_bits_as_after_backward(rank: Rank) -> None:
    for case in CASES:
        plain = replace(case, how=replace(case.how, update="after-backward"))
        after, under = (trained(each, rank) for each in (plain, case))
        assert after[0] == under[0], case
        assert all(map(torch.equal, after[1], under[1])), case


def check_shards_are_the_wholes_bits(rank: Rank) -> None:
    """Ranks that see the same batch average to its gradient, exactly: five bf16 steps are those of one process."""
    interpret_without_gpu()
    from cs336_systems.kernels import adamw

    adamw.BLOCK = adamw.CHUNK  # the same bits, and fewer blocks to interpret
    case = Shared.of(CONFIG, how=UNDER, dtype="bf16", keep="products", optimizer="fused")
    alone, ours = assemble(replace(case, how=Parallel())), assemble(case, rank)
    for seed in range(STEPS):
        batch = random_batch(replace(case, seed=seed))
        assert alone(*batch).item() == ours(*batch).item()
    assert all(map(torch.equal, alone.model.parameters(), ours.model.gather_full_params().values()))


def check_shards_are_updated_while_backward_runs(rank: Rank) -> None:
    step = assemble(PLAIN, rank)
    stepped, most = [], 0
    inner = step.optimizer.step

    def counted(*args, **kwargs):
        nonlocal most
        most = max(most, sum(p.grad is not None for p in step.optimizer.param_groups[0]["params"]))
        stepped.append(step.optimizer)
        return inner(*args, **kwargs)

    step.optimizer.step = counted
    forward, backward, optimizer = step.phases("step", *random_batch(PLAIN, rank)).values()
    forward()
    assert not stepped
    backward()
    assert len(stepped) == CONFIG.n_layers + 2, "embedding, blocks and head"
    sharded = [each.sharded_param for group in step.model.groups for each in group.parameters]
    assert all(p.grad is None for p in sharded)
    assert most <= 7, "no more than one block's gradients at a time"
    optimizer()
    assert len(stepped) == CONFIG.n_layers + 3, "and what is replicated"


def check_a_second_gradient_is_refused_on_every_rank(rank: Rank) -> None:
    step = assemble(PLAIN, rank)
    batch = random_batch(PLAIN, rank)
    step.loss_of(*batch).backward()
    with pytest.raises(RuntimeError, match=r"lm_head.weight has a second gradient .*--update after-backward"):
        step.loss_of(*batch).backward()


def check_what_needs_all_gradients_is_refused(rank: Rank) -> None:
    with pytest.raises(Unsupported, match="update under-backward works on the shards of wrapper fsdp, got bucketed"):
        assemble(replace(PLAIN, how=replace(UNDER, wrapper="bucketed")), rank)
    step, batch = assemble(PLAIN, rank), random_batch(PLAIN, rank)
    with pytest.raises(ValueError, match="mode backward takes no optimizer steps"):
        step.phases("backward", *batch)
    assert list(step.phases("forward", *batch)) == ["forward"]


test_on_two_ranks = pytest.mark.slow(on_each(2, checks_of(globals()), world=__name__))


def test_clipping_needs_all_gradients_first() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    update = object()
    with pytest.raises(ValueError, match="clipping needs all gradients before the first update"):
        TrainStep(model, optimizer, PRECISIONS["fp32"], guard=GradientGuard(1.0), update=update)  # type: ignore[arg-type]
