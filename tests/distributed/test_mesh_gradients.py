"""Every mesh of 2, 4 and 8 ranks: loss and gathered gradients of the first step, on up to four the losses of ten.

Against one process in fp64: they may be off by twice what those of one process under autograd are in the same dtype,
and by a rounding for each rank. Gradients are compared as one vector.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import cycle, product

import pytest
import torch

from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank
from cs336_systems.ranks import Parallel
from cs336_systems.training.assemble import build_model, finish, mesh_of

from .checks import on_ranks
from .test_mesh import (
    LLAMA,
    N_STEPS,
    QWEN2,
    QWEN3,
    Meshed,
    Noting,
    assert_close,
    batch_of,
    own_tokens,
    vector,
    whole_gradients,
)

CONFIGS = [replace(config, n_heads=8, n_kv_heads=8, head_dim=8) for config in (LLAMA, QWEN2, QWEN3)]
ROUNDING = {"fp32": 2**-24, "bf16": 2**-9}


def meshes_of(world_size):
    """Every division of the ranks into replica, shard, context and tensor; each of a model, in turn."""
    sizes = [2**power for power in range(int(math.log2(world_size)) + 1)]
    configs, found = cycle(CONFIGS), []
    for replicas, context, tensor in product(sizes, repeat=3):
        shards, rest = divmod(world_size, replicas * context * tensor)
        if shards and not rest:
            wrapper = "fsdp" if replicas > 1 or len(found) % 2 else "bucketed"
            how = Parallel(wrapper, replicas=replicas, context=context, tensor=tensor)
            found.append(case_of(next(configs), how, "fp32", batch_size=8 // (replicas * shards)))
    return found


def case_of(config, how, dtype, **sizes):
    return Meshed.of(config, how=how, dtype=dtype, keep="products", optimizer="torch-fused", seed=3, **sizes)


def sequences():
    """Eight of them, with targets left out unevenly."""
    return batch_of(case_of(LLAMA, Parallel(), "fp32", batch_size=1), 8)


def train_on(rank: Rank, cases):
    """(Losses, whole gradients of the first step) of each case."""
    found = []
    for case in cases:
        guard, mesh = Noting(), mesh_of(case, rank) or Mesh.over(rank)
        step = finish(build_model(case, rank), case, rank, guard=guard, masked=True)
        own = [own_tokens(x.chunk(mesh.size("data"))[mesh.place("data")], mesh, case) for x in sequences()]
        losses = []
        for _ in range(N_STEPS if rank.world_size < 8 and case.dtype == "fp32" else 1):
            step(*own)
            losses.append(guard.loss.clone())
        found.append((torch.stack(losses), whole_gradients(step.model, guard.first, mesh)))
    return found


@cache
def alone(config, dtype, exact):
    """The same of one process: in fp64 from the same weights, or as autograd does it in the dtype."""
    case = case_of(config, Parallel(), dtype, batch_size=8)
    case = case if exact else replace(case, keep="autograd")
    model, first, losses = build_model(case), None, []
    step = finish(model.double() if exact else model, case, masked=True)
    for _ in range(N_STEPS):
        *passes, update = step.phases("step", *sequences()).values()
        for each in passes:
            each()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        losses.append(step.loss.detach())
        update()
    return torch.stack(losses), first


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_mesh_has_the_gradients_of_one_process(world_size):
    cases = [replace(case, dtype=dtype) for case in meshes_of(world_size) for dtype in ROUNDING]
    for case, found in zip(cases, zip(*on_ranks(train_on, world_size, cases), strict=True), strict=True):
        rounding = ROUNDING[case.dtype]
        (exact_losses, exact), (one_losses, one) = (alone(case.config, case.dtype, each) for each in (True, False))
        for losses, gradients in found:
            off, right = (one_losses - exact_losses)[: len(losses)].abs().max(), exact_losses[: len(losses)]
            assert (losses - right).abs().max() <= 2 * off + 2 * rounding * right.max(), str(case)
            vectors = (vector(each, exact) for each in (gradients, one, exact))
            assert_close(*vectors, world_size * rounding, str(case))
