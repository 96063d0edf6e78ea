"""FSDP's collectives just before attention: the same ones, the same bits, at that moment of each block."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from cs336_systems.case import Parallel, TrainingCase, Unsupported
from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic
from cs336_systems.training import assemble, random_batch
from tests.distributed.checks import failures, world_of

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, n_layers=4, vocab_size=97, context_length=16)
TIED = replace(CONFIG, tie_embeddings=True)


@dataclass(frozen=True)
class Sharded(TrainingCase):
    how: Parallel = field(default_factory=lambda: Parallel("fsdp"))

    @property
    def parallel(self) -> Parallel:
        return self.how


CASES = (
    Sharded.of(CONFIG, keep="products"),
    Sharded.of(TIED, keep="input", dtype="bf16", accumulate=2),
    Sharded.of(CONFIG, keep="1xall+products", how=Parallel("fsdp", prefetch=2, update="under-backward")),
    Sharded.of(CONFIG, keep="products", how=Parallel("fsdp", prefetch=0)),
)


def placed(case: Sharded) -> Sharded:
    return replace(case, how=replace(case.how, communicate="beside-attention"))


def trained(case: Sharded, rank: Rank) -> tuple[list[Tensor], list[tuple[str, int]]]:
    step = assemble(case, rank)
    for seed in range(3):
        step(*random_batch(replace(case, seed=seed), rank))
    with Traffic() as traffic:
        step(*random_batch(case, rank))
    assert isinstance(step.model, FSDP)
    return list(step.model.gather_full_params().values()), sorted((e.kind, e.n_bytes) for e in traffic.sent)


def same_bits_and_bytes(rank: Rank) -> None:
    for case in CASES:
        early, late = trained(case, rank), trained(placed(case), rank)
        assert all(map(torch.equal, early[0], late[0])), case
        assert early[1] == late[1], case


def counts(case: Sharded, rank: Rank) -> dict[str, list[tuple[int, int]]]:
    """Collectives that have started when each block's pass begins and when its attention runs, in a third step."""
    step = assemble(case, rank)
    batch = random_batch(case, rank)
    for _ in range(2):
        step(*batch)
    seen: dict[str, list[int]] = {"forward": [], "backward": []}
    with Traffic() as traffic:

        def noting(direction, operation):
            def run(*arguments, **options):
                seen[direction].append(len(traffic.sent))
                return operation(*arguments, **options)

            return run

        for block in step.model.module.layers:
            ops = block.block_ops
            block.block_ops = replace(
                ops,
                rms_norm_forward=noting("forward", ops.rms_norm_forward),
                attention_forward=noting("forward", ops.attention_forward),
                swiglu_backward_=noting("backward", ops.swiglu_backward_),
                attention_backward=noting("backward", ops.attention_backward),
                rms_norm_backward=noting("backward", ops.rms_norm_backward),
            )
        forward, backward, _ = step.phases("step", *batch).values()
        forward()
        n_forward = [seen["forward"][2 * i : 2 * i + 2] for i in range(CONFIG.n_layers)]
        backward()
    return {"forward": n_forward, "backward": [seen["backward"][4 * i : 4 * i + 4] for i in range(CONFIG.n_layers)]}


def collectives_start_before_attention(rank: Rank) -> None:
    case = Sharded.of(CONFIG, keep="all")
    early, late = counts(case, rank), counts(placed(case), rank)
    for begun, attended in early["forward"]:
        assert attended == begun
    for begun, attended in late["forward"]:
        assert attended == begun + 1, "the next unit's weights"
    for begun, _, _, first_norm in early["backward"]:
        assert first_norm == begun
    for i, (begun, second_norm, _, first_norm) in enumerate(late["backward"]):
        assert second_norm == begun
        assert first_norm == begun + 2, f"weights of the block before, gradients of the one after: {i}"


def what_cannot_tell_is_refused(rank: Rank) -> None:
    with pytest.raises(Unsupported, match="beside-attention needs written-out blocks"):
        assemble(placed(Sharded.of(CONFIG)), rank)
    with pytest.raises(Unsupported, match="works on the shards of wrapper fsdp, got fsdp2"):
        assemble(placed(Sharded.of(CONFIG, keep="all", how=Parallel("fsdp2"))), rank)
    with pytest.raises(ValueError, match="communicate must be at-once or beside-attention, got 'never'"):
        assemble(Sharded.of(CONFIG, how=Parallel("fsdp", communicate="never")), rank)


def a_unit_that_stops_telling_is_not_waited_for(rank: Rank) -> None:
    """Weights that nobody has started to gather come with the next unit; a forward without backward leaves nothing."""
    case = Sharded.of(CONFIG, keep="products")
    told, silent = (assemble(placed(case), rank) for _ in range(2))
    batch = random_batch(case, rank)
    for step in (told, silent):
        step(*batch)
    for block in silent.model.module.layers:
        block.block_ops = assemble(replace(case, how=Parallel())).model.layers[0].block_ops
    for step in (told, silent):
        with torch.no_grad():
            step.loss_of(*batch)
        for _ in range(2):
            step(*batch)
    ours, theirs = (step.model.gather_full_params().values() for step in (told, silent))
    assert all(map(torch.equal, ours, theirs))


CHECKS = (
    same_bits_and_bytes,
    collectives_start_before_attention,
    what_cannot_tell_is_refused,
    a_unit_that_stops_telling_is_not_waited_for,
)
world = world_of(2, CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(world, check) -> None:
    assert failures(world, check) == []
