"""Runs with Muon: two ranks, of which each owns some matrices, train what one does; a run resumes to the bit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank, joined
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.pretraining.trainer import train
from cs336_systems.ranks import Parallel
from cs336_systems.training.muon import muon_groups
from cs336_systems.training.parallel import make_parallel_optimizer
from tests.distributed.checks import on_gpus, on_ranks
from tests.pretraining.trained import (
    assert_equal_weights,
    losses_and_norms,
    options,
    refused,
    train_each,
)
from tests.training.shared import same_bits
from tests.training.test_muon import HYPERPARAMETERS, class_of, groups, make, parameters, run

SPLITS = {"alone": 8, "halves": 4}
"""Sequences of a micro-batch, of the eight of a step."""
CUT = ("two-0", "two-1", "two-2", "two-3", "two-3-resumed", "stages")
"""Runs of two ranks."""


def owners_and_one(rank: Rank) -> None:
    for kind, dtype, n_steps in (("torch", torch.float32, 10), ("fused", torch.bfloat16, 2)):
        alone, shared = parameters(dtype), parameters(dtype)
        run(make(kind, alone), alone, range(n_steps))
        cls, own = class_of(kind)
        optimizer = ShardedOptimizer(groups(shared), cls, bucket_size_mb=0.002, **HYPERPARAMETERS | own)
        assert 0 < len(optimizer.pieces) < len(shared)
        run(optimizer, shared, range(n_steps))
        assert same_bits(alone, shared), kind
        for form in ("reduce-scatter", "shard") if shared[0].device.type == rank.device.type else ():
            shared = parameters(dtype)
            how = {"reduce_gradients": form, "bucket_size_mb": 0.002}
            optimizer = ShardedOptimizer(groups(shared), cls, **how, **HYPERPARAMETERS | own)
            owned = [p for p in shared[:3] if p in optimizer.pieces]
            assert 0 < len(owned) < 3 and all(optimizer.pieces[p].tensor.shape == p.shape for p in owned)
            run(optimizer, shared, range(n_steps))
            assert same_bits(alone, shared), (kind, form)


@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), on_gpus(2)])
def test_owners_update_as_one_process_does_in_its_bits(world_size, device):
    on_ranks(owners_and_one, world_size, device=device)


class Matrices(nn.Module):
    """Four matrices for Muon, of which the third has fewer rows than there are ranks; one for AdamW and a vector."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes, generator = [(48, 32), (16, 40), (2, 24), (24, 24), (30, 8), (20,)], torch.Generator().manual_seed(0)
        values = (0.1 * torch.randn(shape, generator=generator, device="cpu") for shape in shapes)
        *layers, other, vector = (nn.Parameter(value.to(dtype)) for value in values)
        self.layers, self.other, self.vector = nn.ParameterList(layers), other, vector


def rows_and_one(rank: Rank) -> None:
    for kind, dtype, n_steps in (("torch", torch.float32, 5), ("fused", torch.bfloat16, 2)):
        if kind == "fused" and rank.device.type == "cpu" and torch.cuda.is_available():
            continue  # Triton's kernels are compiled here
        cls, own = class_of(kind)
        alone, fsdp = Matrices(dtype).to(rank.device), FSDP(Matrices(dtype).to(rank.device))
        options = HYPERPARAMETERS | own
        one = cls(muon_groups(alone, decay_vectors=False), **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cs336_systems.training.parallel.optimizer_class", lambda *_, cls=cls: (cls, {}))
            ranks = make_parallel_optimizer("muon", fsdp, Parallel("fsdp"), decay="matrices", **options)
        for step in range(n_steps):
            generator = torch.Generator().manual_seed(step)
            drawn = {n: torch.randn(p.shape, generator=generator, device="cpu") for n, p in alone.named_parameters()}
            gradients = {n: drawn[n].to(p) for n, p in alone.named_parameters()}
            for name, parameter in alone.named_parameters():
                parameter.grad = gradients[name]
            for managed in fsdp.managed_parameters():
                rows, first = managed.sharded_param, managed.first_element
                rows.grad = gradients[managed.names[0]].flatten()[first : first + rows.numel()].view_as(rows)
            one.step()
            ranks.step()
        whole = fsdp.gather_full_params()
        assert all(torch.equal(whole[name], parameter) for name, parameter in alone.named_parameters()), kind
        moments = [ranks.state[p]["momentum_buffer"] for p in ranks.param_groups[0]["params"]]
        assert sum(m.numel() for m in moments) < sum(p.numel() for p in alone.layers) / 2


@pytest.mark.parametrize(("world_size", "device"), [(3, "cpu"), on_gpus(4)])
def test_rows_of_ranks_are_updated_as_whole_matrices_are_in_their_bits(world_size, device):
    on_ranks(rows_and_one, world_size, device=device)


@pytest.fixture(scope="module")
def trained(folder):
    """Runs by their folders' names, of one process and of two ranks; those that resume began with one step."""

    def of(name, **changes):
        small = {"optimizer": "muon", "clip": 0.5, "evaluate_every": None, "save_every": 4, "export": False}
        rows = {"batch_size": 4, "total_batch_tokens": 128, "keep_last": 9}
        return options(folder, out=folder / name, **small | rows | changes)

    def half(name, **changes):
        return of(name, walltime=1e-9, save_every=1, **changes)

    with joined("cpu") as rank:
        for name, rows in SPLITS.items():
            train(of(name, batch_size=rows), rank)
        train_each(rank, [half("resumed", batch_size=8), of("resumed", batch_size=8)])
        for changes, said in (
            ({"optimizer": "torch-fused"}, "is a checkpoint of another optimizer"),
            ({"offload": ("m",)}, "offload m needs optimizer fused, got muon"),
            ({"device_gib": 1.0, "host_gib": 1.0}, "--optimizer muon does not go together with --device-gib"),
            ({"agree": "every-step", "replicas": 2}, "--agree every-step does not go together with --optimizer muon"),
        ):
            with pytest.raises(ValueError, match=said):
                train(replace(of("alone", batch_size=8, steps=20), **changes), rank)
    two = [of("two-0"), of("two-1", zero=1), half("two-resumed", zero=1), of("two-resumed", zero=0)]
    two += [of("stages", zero=1, pipeline=2, batch_size=2, keep="products")]
    two += [of(f"two-{zero}", zero=zero) for zero in (2, 3)]
    two += [half("two-3-resumed", zero=2), of("two-3-resumed", zero=3)]
    on_ranks(train_each, 2, two)
    said = on_ranks(refused, 2, of("refused", tensor=2, keep="products"))
    assert all("optimizer muon needs whole matrices" in each and "\n" not in each for each in said), said
    return folder


@pytest.mark.slow
def test_ranks_change_no_more_than_another_order_of_addition(trained):
    found = {name: torch.tensor(losses_and_norms(trained / name), dtype=torch.float64) for name in (*SPLITS, *CUT)}
    alone = found["alone"]
    # What rounding has changed in the weights shows in the loss or in the norm; by how much in either is chance.
    shown = ((found["halves"] - alone) / alone).abs().amax(1, keepdim=True).cummax(0).values
    budget = (8 * shown + 2**-22) * alone
    for name in CUT:
        off = (found[name] - alone).abs()
        assert (off <= budget).all(), (name, off, budget)
    assert (found["alone"][:, 1] > 0.5).any()  # some gradients are clipped
    assert found["alone"][-1, 0] < found["alone"][0, 0] - 0.3


@pytest.mark.slow
def test_the_same_bits_where_matrices_have_owners_and_after_a_resume(trained):
    for one, other in (("two-0", "two-1"), ("two-0", "two-resumed"), ("alone", "resumed")):
        assert losses_and_norms(trained / other) == losses_and_norms(trained / one)
        assert_equal_weights(trained / one, trained / other)
