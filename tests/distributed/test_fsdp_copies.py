"""FSDP whose ranks copy each other's rows: every behaviour of collectives again; no row is read while it is written."""

import os

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.costs.fsdp import model_units, step_traffic
from cs336_systems.distributed import FSDP
from cs336_systems.distributed.peer_memory import Copies, why_not_mapped
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic

from . import test_fsdp, test_fsdp_backward, test_fsdp_gpu, test_fsdp_quantized, test_fsdp_ranks
from .checks import on_gpus, on_ranks
from .fsdp_models import sharded

LATE = 100_000_000
"""Cycles of a GPU, some 50 ms: longer than the other rank takes for all that it does meanwhile."""


def layers(rank: Rank) -> tuple[nn.Module, FSDP, Tensor]:
    """A model, the same whose weights are copied, and inputs."""
    reference, fsdp = sharded(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), peer_copies=True)
    return reference, fsdp, torch.randn(4, 64, dtype=torch.float64, device=rank.device)


def sleep(rank: Rank) -> None:
    """Rank 0's current stream; on CPUs ranks wait for each other before they write, as they compare what they do."""
    if rank.rank == 0 and rank.device.type == "cuda":
        torch.cuda._sleep(LATE)


@torch.no_grad()
def units_called_outside_a_forward_are_gathered_in_collectives(rank: Rank) -> None:
    """Nobody waits for such a reader before rows are written again."""
    reference, fsdp, x = layers(rank)
    fsdp(x)
    with Traffic() as log:
        found = fsdp.module[2](x)
    assert len(log.sent) == 1 and "allgather" in log.sent[0].kind
    torch.testing.assert_close(found, reference[2](x))
    handle = fsdp.module[1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        fsdp(x)
    handle.remove()
    with Traffic() as log:
        found = fsdp.module[0](x)
    assert any("allgather" in event.kind for event in log.sent)
    torch.testing.assert_close(found, reference[0](x))
    torch.testing.assert_close(fsdp(x), reference(x))


def fail(*_: object) -> None:
    raise KeyError


def ranks_are_told_that_one_has_failed_in_a_forward(rank: Rank) -> None:
    """Whatever it does next; at once, for nobody is in a gather that it does not come to."""
    reference, fsdp, x = layers(rank)
    for what_next in (fsdp, fsdp.module[1], fsdp.module[0]):
        for _ in range(2):
            torch.testing.assert_close(fsdp(x), reference(x))
        if rank.rank == 0:
            handle = fsdp.module[1].register_forward_pre_hook(fail)
            with pytest.raises(KeyError):
                fsdp(x)
            handle.remove()
        with pytest.raises(RuntimeError, match="rank 1 ends a forward"):
            (what_next if rank.rank == 0 else fsdp)(x)
    torch.testing.assert_close(fsdp(x), reference(x))


def ranks_are_told_that_one_has_failed_in_a_backward_that_sends_nothing(rank: Rank) -> None:
    reference, fsdp, x = layers(rank)
    with fsdp.no_sync():
        fsdp(x).sum().backward()
        output = fsdp(x)
        if rank.rank == 0:
            output.register_hook(fail)
            with pytest.raises(KeyError):
                output.sum().backward()
        with pytest.raises(RuntimeError, match="ends a backward"):
            fsdp(x) if rank.rank == 0 else output.sum().backward()
    torch.testing.assert_close(fsdp(x), reference(x))


def all_that_is_sent_is_predicted(rank: Rank) -> None:
    """No weights, in a first step and in later ones, stored or quantized."""
    for fp8 in (False, True):
        model = test_fsdp_quantized.model_of(device=rank.device)
        config, units = test_fsdp_quantized.CONFIG, model_units(test_fsdp_quantized.CONFIG)
        fsdp = test_fsdp_quantized.fsdp_of(model, travels=fp8, peer_copies=True)
        quantized = range(1, 1 + config.n_layers) if fp8 else ()
        expected = step_traffic(units, 2, compute_bytes=2, gradient_bytes=2, quantized=quantized, peer_copies=True)
        for _ in range(2):
            with Traffic() as log:
                test_fsdp_quantized.train(fsdp, 1)
            assert len(log.sent) == sum(expected.counts.values())
            assert not any("allgather" in event.kind for event in log.sent)
            reduced = sum(event.n_bytes for event in log.sent if event.kind == "allreduce")
            assert reduced == expected.messages["all-reduce"]


@torch.no_grad()
def rows_are_written_after_the_last_rank_has_read_them(rank: Rank) -> None:
    reference, fsdp, x = layers(rank)
    begin = Copies.begin

    def late(copies: Copies) -> Copies:
        sleep(rank)
        return begin(copies)

    Copies.begin = late
    try:
        for _ in range(3):
            found = fsdp(x)
            for parameter in fsdp.parameters():
                parameter.add_(1)
            torch.testing.assert_close(found, reference(x))
            for parameter in reference.parameters():
                parameter.add_(1)
    finally:
        Copies.begin = begin


@torch.no_grad()
def rows_are_read_after_the_last_rank_has_written_them(rank: Rank) -> None:
    reference, fsdp, x = layers(rank)
    for _ in range(3):
        sleep(rank)
        for parameter in [*fsdp.parameters(), *reference.parameters()]:
            parameter.add_(1)
        torch.testing.assert_close(fsdp(x), reference(x))


OWN = [
    all_that_is_sent_is_predicted,
    units_called_outside_a_forward_are_gathered_in_collectives,
    ranks_are_told_that_one_has_failed_in_a_forward,
    ranks_are_told_that_one_has_failed_in_a_backward_that_sends_nothing,
    rows_are_written_after_the_last_rank_has_read_them,
    rows_are_read_after_the_last_rank_has_written_them,
]
ON_CPUS = [
    *OWN,
    test_fsdp.check_every_kind_of_parameter_is_trained,
    test_fsdp.check_a_forward_changes_course,
    test_fsdp_backward.check_a_step_needs_no_call_to_finish,
    test_fsdp_backward.check_a_failed_backward_leaves_nothing_to_the_next_step,
    *test_fsdp_ranks.CHECKS,
    test_fsdp_quantized.the_steps_are_those_of_one_rank,
    test_fsdp_quantized.rows_are_quantized_once_until_some_rank_changes_its_own,
]
ON_GPUS = [*OWN, *test_fsdp_gpu.CHECKS, *test_fsdp_quantized.ON_GPUS]


def run_by_copies(rank: Rank, check):
    """The check, with copies where it says nothing about how weights travel."""
    assert why_not_mapped(rank.device, torch.distributed.group.WORLD) is None
    defaults = FSDP.__init__.__kwdefaults__
    defaults["peer_copies"] = True
    try:
        check(rank)
    finally:
        defaults["peer_copies"] = False


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files in memory")
@pytest.mark.parametrize("check", ON_CPUS, ids=lambda check: check.__name__)
def test_two_ranks(check):
    on_ranks(run_by_copies, 2, check)


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2, copies=True), on_gpus(4, copies=True)])
def test_gpus(world_size, device):
    checks = [*ON_GPUS, *test_fsdp_ranks.CHECKS] if world_size == 2 else ON_GPUS
    for check in checks:
        on_ranks(run_by_copies, world_size, check, device=device)
