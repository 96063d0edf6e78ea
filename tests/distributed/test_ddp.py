"""The DDP ladder: what is sent in a step, and what is refused; ``test_parity.py`` compares what it trains."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from cs336_systems.distributed.ddp import BucketedDDP, NaiveDDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import MATMUL, Traffic

from .checks import on_gpus, on_ranks, run
from .toys import LADDER, Toy


def what_is_sent(rank: Rank):
    """By rung: the events of construction and of three steps, of one in no_sync, and CommDebugMode's count of one."""
    torch.manual_seed(rank.rank)
    found = {}
    for name, wrap in LADDER.items():
        with rank.device:
            module, x = Toy(), torch.randn(4, 6)
        with Traffic() as construction:
            model = wrap(module)
        steps = []
        for _ in range(3):
            with Traffic() as traffic:
                model(x).sum().backward()
                model.finish_gradient_synchronization()
            model.zero_grad()
            steps.append(traffic.events)
        with model.no_sync(), Traffic() as silent:
            model(x).sum().backward()
            model.finish_gradient_synchronization()
        with CommDebugMode() as counter:
            model(x).sum().backward()
        found[name] = (construction.sent, steps, silent.sent, counter.get_total_counts())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), on_gpus(2)])
def test_number_kind_and_bytes_of_collectives(world_size, device):
    sizes = {"enter": 48 + 8, "tied": 64, "scale": 1, "leave": 24 + 3}
    frozen, n_trainable = 72, 6
    gradient_bytes = 4 * sum(sizes.values())
    # reverse of construction: leave.bias 12 B, leave.weight 96, tied 256, enter.bias 32, enter.weight 192, scale 4
    per_bucket = [12 + 96, 256 + 32, 192 + 4]
    flags = ("allreduce", n_trainable)
    for found in on_ranks(what_is_sent, world_size, device=device):
        for name, (construction, steps, silent, counted) in found.items():
            weights = [(event.kind, event.n_bytes) for event in construction if event.kind == "broadcast"]
            assert sorted(weights) == [
                ("broadcast", 3),
                ("broadcast", 8),
                ("broadcast", 4 * frozen + gradient_bytes + 32),
            ]
            assert silent == []
            for events in steps:
                sent = [(event.kind, event.n_bytes) for event in events if event.kind != MATMUL]
                during = name in ("overlapped", "bucketed")
                assert sent[-1] == flags
                gradients = [n_bytes for kind, n_bytes in sent if (kind, n_bytes) != flags and kind == "allreduce"]
                assert sum(gradients) == gradient_bytes
                assert len(gradients) == {"naive": 6, "flat": 1, "overlapped": 6, "bucketed": 3}[name]
                kinds = [event.kind for event in events]
                last_matmul = len(kinds) - 1 - kinds[::-1].index(MATMUL)
                assert ("allreduce" in kinds[:last_matmul]) == during  # sent before backward has ended, or not
                if name == "bucketed":
                    assert gradients == per_bucket
            assert counted == len(gradients) + 1


@pytest.mark.slow
def test_a_rank_that_raises_in_backward_ends_the_others():
    peer, failed = run(fails_in_backward, 2)
    assert "OverflowError: no gradient for you" in failed.failure
    assert peer.failure is not None


def fails_in_backward(rank: Rank):
    model = BucketedDDP(Toy(), bucket_size_mb=1)

    def refuse(gradient):
        raise OverflowError("no gradient for you")

    if rank.rank == 1:
        model.module.first.weight.register_hook(refuse)
    model(torch.randn(2, 6)).sum().backward()


def test_bucket_sizes_and_a_missing_process_group_are_refused():
    for size in (0, math.nan):
        with pytest.raises(ValueError, match=f"bucket_size_mb must be positive, got {size}"):
            BucketedDDP(nn.Linear(2, 2), bucket_size_mb=size)
    with pytest.raises(RuntimeError, match="NaiveDDP needs a process group"):
        NaiveDDP(nn.Linear(2, 2))
