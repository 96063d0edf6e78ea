"""The DDP ladder against one process on the whole batch: parameters after several steps, and what was sent."""

import copy
import dataclasses
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from cs336_systems.distributed.buckets import MIB
from cs336_systems.distributed.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import MATMUL, Traffic
from cs336_systems.training import AdamW

from .checks import on_gpus, on_ranks, run
from .toys import Toy

LADDER = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": functools.partial(BucketedDDP, bucket_size_mb=300 / MIB),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.01),
}
STEPS = 4

GLOBAL_BATCH = 8


def identical_on_all_ranks(tensors):
    """Whether the tensors hold the same bits everywhere."""
    flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other, flat) for other in everyone)


def train(model, optimizer, batches, rank: Rank | None = None):
    """Steps on mean squared error: on every batch whole, or on this rank's share of it; the parameters at the end."""
    for x, y in batches:
        if rank is not None:
            x, y = x.chunk(rank.world_size)[rank.rank], y.chunk(rank.world_size)[rank.rank]
        nn.functional.mse_loss(model(x), y).backward()
        if rank is not None:
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def worst_errors(rank: Rank, dtype):
    """By rung and optimizer: the largest error of DDP and of one process, both against one process in fp64."""
    torch.manual_seed(0)
    start = Toy(torch.float64)
    batches = [
        (torch.randn(GLOBAL_BATCH, 6, dtype=torch.float64), torch.randn(GLOBAL_BATCH, 3, dtype=torch.float64))
        for _ in range(STEPS)
    ]
    cast = [(x.to(dtype), y.to(dtype)) for x, y in batches]
    errors = {}
    for optimizer_name, make_optimizer in OPTIMIZERS.items():
        exact = copy.deepcopy(start)
        truth = train(exact, make_optimizer(exact.parameters()), batches)
        alone = copy.deepcopy(start).to(dtype)
        single = train(alone, make_optimizer(alone.parameters()), cast)
        for name, wrap in LADDER.items():
            local = copy.deepcopy(start).to(dtype)
            if rank.rank:
                for tensor in (*local.parameters(), *local.buffers()):
                    tensor.data.zero_()
            model = wrap(local)
            assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(local.buffers(), start.buffers(), strict=True))
            replica = train(model, make_optimizer(model.parameters()), cast, rank)
            assert identical_on_all_ranks(replica)
            errors[name, optimizer_name] = tuple(
                max((a.double() - b).abs().max().item() for a, b in zip(found, truth, strict=True))
                for found in (replica, single)
            )
    return errors


def parity(rank: Rank):
    with rank.device:
        return worst_errors(rank, torch.float64), worst_errors(rank, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "device"), [(1, "cpu"), (2, "cpu"), (4, "cpu"), on_gpus(2), on_gpus(4)])
def test_parameters_are_those_of_one_process_on_the_whole_batch(world_size, device):
    for in_double, in_single in on_ranks(parity, world_size, device=device):
        for case, (ddp, _) in in_double.items():
            assert ddp < 1e-13, case
        for case, (ddp, single) in in_single.items():
            assert ddp < 4 * single, case
            assert single < 1e-5


def what_is_sent(rank: Rank):
    """By rung: the events of construction and of three steps, of one in no_sync, and CommDebugMode's count of one."""
    with rank.device:
        return events_by_rung(rank)


def events_by_rung(rank: Rank):
    torch.manual_seed(rank.rank)
    found = {}
    for name, wrap in LADDER.items():
        module = Toy()
        with Traffic() as construction:
            model = wrap(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for _ in range(3):
            batch = [(torch.randn(4, 6), torch.randn(4, 3))]
            with Traffic() as traffic:
                train(model, optimizer, batch, dataclasses.replace(rank, rank=0, world_size=1))  # not to be divided
            steps.append(traffic.events)
        with model.no_sync(), Traffic() as silent:
            model(torch.randn(4, 6)).sum().backward()
            model.finish_gradient_synchronization()
        with CommDebugMode() as counter:
            model(torch.randn(4, 6)).sum().backward()
            model.finish_gradient_synchronization()
        found[name] = (construction.sent, steps, silent.sent, counter.get_total_counts())
    return found


@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), on_gpus(2)])
def test_number_kind_and_bytes_of_collectives(world_size, device):
    sizes = {"enter": 48 + 8, "tied": 64, "scale": 1, "leave": 24 + 3}
    frozen, n_trainable = 72, 6
    gradient_bytes = 4 * sum(sizes.values())
    # reverse of construction: leave.bias 12 B, leave.weight 96, scale 4, tied 256, enter.bias 32, enter.weight 192
    # backward's order: leave.bias, leave.weight, scale, tied, enter.bias, enter.weight; at most 300 bytes together
    per_bucket = [12 + 96 + 4, 256 + 32, 192]
    buffers = [("broadcast", 32), ("broadcast", 8), ("broadcast", 3)]
    flags = ("allreduce", n_trainable)
    order = ("broadcast", 8 * n_trainable)
    for found in on_ranks(what_is_sent, world_size, device=device):
        for name, (construction, steps, silent, counted) in found.items():
            weights = [(event.kind, event.n_bytes) for event in construction if event.kind == "broadcast"]
            assert sorted(weights) == sorted([("broadcast", 4 * frozen + gradient_bytes + 32), *buffers[1:]])
            assert silent == []
            for i, events in enumerate(steps):
                sent = [(event.kind, event.n_bytes) for event in events if event.kind != MATMUL]
                assert sorted(sent[:3]) == sorted(buffers)
                during = name in ("overlapped", "bucketed")
                assert sent[-1] == (order if during and i == 0 else flags)
                gradients = [n_bytes for kind, n_bytes in sent if (kind, n_bytes) != flags and kind == "allreduce"]
                assert sum(gradients) == gradient_bytes
                assert len(gradients) == {"naive": 6, "flat": 1, "overlapped": 6, "bucketed": 3}[name]
                kinds = [event.kind for event in events]
                last_matmul = len(kinds) - 1 - kinds[::-1].index(MATMUL)
                assert ("allreduce" in kinds[:last_matmul]) == during  # sent before backward has ended, or not
                if name == "bucketed" and i > 0:
                    assert gradients == per_bucket
            assert counted == len(gradients) + 1 + len(buffers)


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
    model.finish_gradient_synchronization()


def test_bucket_sizes_are_checked():
    for size in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="bucket_size_mb must be positive"):
            BucketedDDP(nn.Linear(2, 2), bucket_size_mb=size)


def test_a_process_group_is_needed():
    with pytest.raises(RuntimeError, match="NaiveDDP needs a process group"):
        NaiveDDP(nn.Linear(2, 2))
