"""Training over the stages of a pipeline against one process: losses, norms, weights, messages."""

from dataclasses import replace

import torch

from cs336_systems.case import SCHEDULES, Parallel
from cs336_systems.config import ModelConfig
from cs336_systems.distributed.process_group import Rank
from cs336_systems.training.assemble import build_model, finish, mesh_of, random_batch
from cs336_systems.training.clipping import GradientGuard

from .checks import on_ranks
from .test_mesh import MAX_NORM, WAYS, Meshed, alone, ignoring, on_cpu, own_tokens, train

LLAMA = ModelConfig("tiny-llama", 32, 64, 5, 8, vocab_size=96, context_length=16, n_kv_heads=4)
TIED = replace(LLAMA, name="tiny-tied", qkv_bias=True, tie_embeddings=True)
NORMED = replace(LLAMA, name="tiny-normed", qk_norm=True, head_dim=8)


def run_of(pipeline, schedule, way="alone", config=LLAMA, accumulate=4, **others):
    wrapper, state = WAYS.get(way, ("none", "replicated"))
    how = Parallel(wrapper, state, 0.01, pipeline=pipeline, pipeline_schedule=schedule, **others)
    return Meshed.of(
        config, how=how, batch_size=2, accumulate=accumulate, keep="products", optimizer="torch-fused", seed=3
    )


ON_TWO = [run_of(2, name) for name in SCHEDULES]
ON_TWO += [run_of(2, "1f1b", config=TIED), run_of(2, "zbv", config=TIED), run_of(2, "zb-h1", config=NORMED)]


def train_on(rank: Rank, cases):
    found = []
    for case in cases:
        mesh, guard = mesh_of(case, rank), GradientGuard(MAX_NORM)
        step = finish(build_model(case, rank), case, rank, guard=guard)
        place = Rank(mesh.place("data"), 0, 1, rank.device, rank.backend)
        batch = tuple(
            own_tokens(each, mesh, case) for each in ignoring(random_batch(replace(case, how=Parallel()), place))
        )
        losses, norms = train(step, guard, batch)
        module = step.model.module if hasattr(step.model, "module") else step.model
        found.append(on_cpu(losses, norms, dict(module.named_parameters())))
    return found


def compare(world_size, cases):
    for case, of_ranks in zip(cases, zip(*on_ranks(train_on, world_size, cases), strict=True), strict=True):
        losses, norms, weights = alone(case, world_size // case.parallel.ranks_per_batch)
        assert norms.min() > MAX_NORM
        seen = set()
        for own_losses, own_norms, own_weights in of_ranks:
            torch.testing.assert_close(own_losses, losses, rtol=2e-6, atol=0)
            torch.testing.assert_close(own_norms, norms, rtol=1e-5, atol=0)
            for name, own in own_weights.items():
                assert ((own - weights[name]).abs() > 1e-5).float().mean() < 0.01, (str(case), name)
            seen |= own_weights.keys()
        assert seen == weights.keys()


def test_two_stages_train_what_one_process_trains():
    compare(2, ON_TWO)
