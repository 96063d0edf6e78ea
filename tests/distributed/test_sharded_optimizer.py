"""The sharded optimizer against one process: the same parameters, a share of the state, and no more sent than stated.

Most checks run on two ranks that are started once; each rank asserts for itself, and each check is a test. A bucket
holds a few tensors of a small model, so that every step has several buckets, and the ranks' shards cut tensors.
"""

import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.costs.sharding import state_bytes_by_rank
from cs336_systems.distributed.ddp import BucketedDDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

from .checks import on_each, on_ranks
from .sharding_models import FORMS, OPTIMIZERS, TINY_BUCKETS, Toy, backward_on_all, flat, loss_of, train

ADAMW = {"lr": 0.01, "weight_decay": 0.1}


class CollectiveLog(TorchDispatchMode):
    """What the code inside does, in order: collectives as (name, bytes of what they write), products as ("mm", 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__.strip("_")
        if func.namespace == "c10d":
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.events.append((name, sum(tensor.nbytes for tensor in written)))
        elif name == "mm":
            self.events.append((name, 0))
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> list[tuple[str, int]]:
        return [event for event in self.events if event[0] != "mm"]


def sharded(model: nn.Module, form: str | None = None, name: str = "adamw", **options) -> ShardedOptimizer:
    optimizer_cls, kwargs = OPTIMIZERS[name]
    return ShardedOptimizer(
        model.parameters(), optimizer_cls, reduce_gradients=form, **{**TINY_BUCKETS, **kwargs, **options}
    )


def assert_same_on_all_ranks(model: nn.Module) -> None:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, flat(model))
    assert all(torch.equal(value, values[0]) for value in values)


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """State of this rank but for step counters."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )


def parity(rank: Rank) -> None:
    """Of two ranks the sum of gradients is the same number in either order: bitwise."""
    for form in FORMS:
        for name, (optimizer_cls, kwargs) in OPTIMIZERS.items():
            alone, together = Toy(), Toy()
            train(alone, optimizer_cls(alone.parameters(), **kwargs), range(5), rank.world_size, rank.rank)
            train(together, sharded(together, form, name), range(5), rank.world_size, rank.rank)
            assert torch.isfinite(flat(alone)).all()
            assert torch.equal(flat(together), flat(alone)), (form, name)


def beside_data_parallelism(rank: Rank) -> None:
    """The handout's pair: gradients averaged into buckets by DDP, of which they are views, then the owners' update."""
    model, expected = Toy(), Toy()
    parallel = BucketedDDP(model, bucket_size_mb=TINY_BUCKETS["bucket_size_mb"])
    optimizer = sharded(model)
    for step in range(4):
        loss_of(parallel, step, rank.rank).backward()
        parallel.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    alone = torch.optim.AdamW(expected.parameters(), **ADAMW)
    for step in range(4):
        backward_on_all(expected, step, rank.world_size)
        alone.step()
    assert torch.equal(flat(model), flat(expected))


def memory_formats_are_kept(rank: Rank) -> None:
    for form in FORMS:
        model = Toy()
        strides = [parameter.stride() for parameter in model.parameters()]
        train(model, sharded(model, form), range(1), rank.world_size, rank.rank)
        assert [parameter.stride() for parameter in model.parameters()] == strides


def collectives_of_a_step(rank: Rank) -> None:
    """16 fp32 matrices of 4 KiB, two to a bucket: every byte is sent as stated, none besides but a byte a parameter."""
    for form in FORMS:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(16)))
        optimizer = sharded(model, form, bucket_size_mb=8192 / 1024**2)
        for _ in range(2):
            with CollectiveLog() as backward:
                model(torch.ones(2, 32)).sum().backward()
            with CommDebugMode() as counted, CollectiveLog() as step:
                optimizer.step()
            optimizer.zero_grad()
        if form is None:
            assert backward.sent == []
            assert step.sent == [("broadcast", 8192)] * 8
        else:
            assert backward.sent == [("reduce_scatter_base", 8192 // rank.world_size)] * 8
            assert step.sent == [("allreduce", 16)] + [("allgather_base", 8192)] * 8
        assert counted.get_total_counts() == len(step.sent)


def whole_gradients_are_freed_and_backwards_add_up(rank: Rank) -> None:
    """Of 8 buckets two are whole at most, then none; two backwards are their sum, whatever a rank used in them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    other = copy.deepcopy(model)
    optimizer = sharded(model, "shard", bucket_size_mb=4096 / 1024**2)
    twin = sharded(other, "reduce-scatter", bucket_size_mb=4096 / 1024**2)
    whole = []

    def count(parameter: nn.Parameter) -> None:
        whole.append(sum(each.grad is not None for each in model.parameters()))
        whole.append(sum(bucket._gradients is not None for bucket in optimizer._scatter.buckets))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    for step in range(3):
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(step + 5 * rank.rank))
        model[rank.rank * (step == 1) :](x).sum().backward()  # once rank 1 has no gradient of the first layer
        model(x).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        with twin.no_sync():
            other[rank.rank * (step == 1) :](x).sum().backward()
        other(x).sum().backward()
        for one in (optimizer, twin):
            one.step()
            one.zero_grad()
        torch.testing.assert_close(flat(model), flat(other), rtol=1e-5, atol=1e-6)
    assert max(whole) <= 2
    assert_same_on_all_ranks(model)


def reducing_starts_under_backward(rank: Rank) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    optimizer = sharded(model, "reduce-scatter", bucket_size_mb=8192 / 1024**2)
    with CollectiveLog() as log:
        model(torch.ones(2, 32)).sum().backward()
    names = [name for name, _ in log.events]
    assert names[-1] == "reduce_scatter_base"
    assert "mm" in names[names.index("reduce_scatter_base") :]
    optimizer.zero_grad()


def state_is_a_share(rank: Rank) -> None:
    """As predicted, to the byte, and balanced to 3 % of the mean where tensors allow."""
    for form, predicted_form in zip(FORMS, ("owned", "scattered", "scattered"), strict=True):
        for name, per_parameter in (("sgd", 1), ("adamw", 2), ("ours", 2)):
            model = nn.Sequential(*(nn.Linear(20 + i, 21 + i) for i in range(12)))
            optimizer = sharded(model, form, name)
            model(torch.ones(2, 20)).sum().backward()
            optimizer.step()
            sizes = [parameter.nbytes for parameter in model.parameters()]
            by_rank = state_bytes_by_rank(
                predicted_form, sizes, rank.world_size, per_parameter=per_parameter, bucket_bytes=600
            )
            assert held_bytes(optimizer) == by_rank[rank.rank]
            assert sum(by_rank) == per_parameter * sum(sizes)
            if form is None:
                assert max(by_rank) <= 1.03 * sum(by_rank) / rank.world_size


def groups_and_schedulers(rank: Rank) -> None:
    """Options of groups, groups added later, and rates that a scheduler writes, all act."""

    def build(make):
        model = Toy()
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        rest = [p for name, p in model.named_parameters() if "." not in name]
        optimizer = make([{"params": weights, "weight_decay": 0.5}, {"params": biases, "lr": 0.1}])
        optimizer.add_param_group({"params": rest, "lr": 0.02, "betas": (0.5, 0.9)})
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)

    results = []
    for form in ("alone", *FORMS):
        model, optimizer, scheduler = build(
            lambda groups, form=form: (
                torch.optim.AdamW(groups, **ADAMW)
                if form == "alone"
                else ShardedOptimizer(groups, torch.optim.AdamW, reduce_gradients=form, **TINY_BUCKETS, **ADAMW)
            )
        )
        for step in range(5):
            train(model, optimizer, range(step, step + 1), rank.world_size, rank.rank)
            scheduler.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        results.append((flat(model), rates))
    assert results[0][1] == pytest.approx([0.01 * 0.09, 0.1 * 0.09, 0.02 * 0.09])
    for parameters, rates in results[1:]:
        assert rates == results[0][1]
        assert torch.equal(parameters, results[0][0])


def saved_layers_are_small(rank: Rank) -> None:
    """A layer that is saved by itself takes its own bytes, not those of the buffer that it shares with others."""
    for form in FORMS:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(300, 300), nn.Linear(0, 4))
        sharded(model, form, bucket_size_mb=1)
        before = io.BytesIO()
        torch.save(nn.Linear(4, 4).state_dict(), before)
        saved = io.BytesIO()
        torch.save(model[0].state_dict(), saved)
        assert saved.tell() <= before.tell()
        assert copy.deepcopy(model[0].weight).untyped_storage().nbytes() == model[0].weight.nbytes


def saved_state_is_whole(rank: Rank) -> bytes:
    """Equal to one process's, on all ranks or on one; returns both forms' checkpoints after three steps."""
    saved = []
    expected = Toy()
    alone = torch.optim.AdamW(expected.parameters(), **ADAMW)
    train(expected, alone, range(3), rank.world_size, rank.rank)
    for form in FORMS:
        model = Toy()
        optimizer = sharded(model, form)
        train(model, optimizer, range(3), rank.world_size, rank.rank)
        whole, theirs = optimizer.state_dict(), alone.state_dict()
        torch.testing.assert_close(whole, theirs, rtol=0, atol=0)
        for_rank_1 = optimizer.state_dict(to=1)
        assert bool(for_rank_1) == (rank.rank == 1)
        if not for_rank_1:
            with pytest.raises(ValueError, match="needs state and param_groups"):
                optimizer.load_state_dict(for_rank_1)
        mismatched = copy.deepcopy(whole)
        mismatched["state"][2]["exp_avg"] = torch.zeros(3)
        before = optimizer.state_dict()
        with pytest.raises(ValueError, match=re.escape("exp_avg has shape (3,)")):
            optimizer.load_state_dict(mismatched)
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
        saved.append((model.state_dict(), whole))
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def constructor_errors(rank: Rank) -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    for params, error in (([], ValueError), (torch.ones(1), TypeError), (1.2, TypeError), ([*weights, 42], TypeError)):
        with pytest.raises(error):
            ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="subclass of torch.optim.Optimizer, got 'SGD'"):
        ShardedOptimizer(weights, "SGD", lr=0.1)
    with pytest.raises(ValueError, match="reduce_gradients must be None, 'reduce-scatter' or 'shard', got 'scatter'"):
        ShardedOptimizer(weights, torch.optim.SGD, reduce_gradients="scatter")
    with pytest.raises(ValueError, match="bucket_size_mb must be positive and finite, got 0"):
        ShardedOptimizer(weights, torch.optim.SGD, bucket_size_mb=0)
    with pytest.raises(TypeError):
        ShardedOptimizer(weights, torch.optim.SGD, no_such_option=1)
    sparse = torch.eye(3).to_sparse().requires_grad_()
    with pytest.raises(ValueError, match="must be dense"):
        ShardedOptimizer([sparse], torch.optim.SGD, lr=0.1)
    shapes = [nn.Parameter(torch.ones(3 + rank.rank))]
    with pytest.raises(ValueError, match="parameters to shard differ across ranks at index 0"):
        ShardedOptimizer(shapes, torch.optim.SGD, lr=0.1)
    named = ShardedOptimizer([("first", weights[0])], torch.optim.SGD, lr=0.1)
    assert named.state_dict()["param_groups"][0]["param_names"] == ["first"]
    optimizer = ShardedOptimizer(weights[:1], torch.optim.SGD, lr=0.1)
    for group in ({"params": weights[:1]}, {"params": shapes}):
        with pytest.raises(ValueError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


CHECKS = (
    parity,
    beside_data_parallelism,
    memory_formats_are_kept,
    collectives_of_a_step,
    whole_gradients_are_freed_and_backwards_add_up,
    reducing_starts_under_backward,
    state_is_a_share,
    groups_and_schedulers,
    saved_layers_are_small,
    saved_state_is_whole,
    constructor_errors,
)


test_on_two_ranks = on_each(2, CHECKS)


def go_on(rank: Rank, checkpoint: bytes) -> list[torch.Tensor]:
    """Load what two ranks of each form saved into each form here, and take two steps with gradients of two ranks."""
    results = []
    for model_state, optimizer_state in torch.load(io.BytesIO(checkpoint)):
        for form in ("alone", *FORMS):
            model = Toy()
            model.load_state_dict(model_state)
            optimizer = torch.optim.AdamW(model.parameters()) if form == "alone" else sharded(model, form, lr=77.0)
            optimizer.load_state_dict(copy.deepcopy(optimizer_state))  # torch's own would go on in these very tensors
            for step in (3, 4):
                twin = Toy()  # whose gradients nobody reduces
                twin.load_state_dict(model.state_dict())
                backward_on_all(twin, step, 2)
                for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                    parameter.grad = other.grad
                optimizer.step()
                optimizer.zero_grad()
            results.append(flat(model))
    return results


def other_worlds(rank: Rank, checkpoint: bytes) -> list[torch.Tensor]:
    """Four ranks: parity with all optimizers, a checkpoint of two ranks, and fewer parameters than ranks."""
    if rank.world_size == 4:
        for form in FORMS:
            for name, (optimizer_cls, kwargs) in OPTIMIZERS.items():
                alone, together = Toy().double(), Toy().double()
                train(alone, optimizer_cls(alone.parameters(), **kwargs), range(3), 4, rank.rank)
                train(together, sharded(together, form, name), range(3), 4, rank.rank)
                assert_same_on_all_ranks(together)
                if form is None:
                    assert torch.equal(flat(together), flat(alone))
                else:  # four gradients are added in another order: 1e-12 is some thousand roundings
                    torch.testing.assert_close(flat(together), flat(alone), rtol=1e-12, atol=1e-12)
        for form in FORMS:
            weight = nn.Parameter(torch.ones(5))
            optimizer = ShardedOptimizer([weight], torch.optim.SGD, reduce_gradients=form, lr=1.0, momentum=0.5)
            for _ in range(2):
                weight.grad = torch.ones(5)
                optimizer.step()
                if form == "shard":  # in which gradients stay at the optimizer until they are cleared there
                    optimizer.zero_grad()
            assert torch.equal(weight, torch.full((5,), 1 - 1 - 1.5))
            assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [1.5] * 5
    return go_on(rank, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_alike_in_another_world(world_size):
    expected = Toy()
    optimizer = torch.optim.AdamW(expected.parameters(), **ADAMW)
    train(expected, optimizer, range(5), 2, 0)
    for results in on_ranks(other_worlds, world_size, on_ranks(saved_state_is_whole, 2)[0]):
        assert len(results) == len(FORMS) * (1 + len(FORMS))
        assert all(torch.equal(result, flat(expected)) for result in results)


@pytest.mark.parametrize("form", FORMS)
def test_without_a_process_group_it_is_the_optimizer_itself(form):
    model, expected = Toy(), Toy()
    optimizer = sharded(model, form)
    train(model, optimizer, range(3), 1, 0)
    train(expected, torch.optim.AdamW(expected.parameters(), **ADAMW), range(3), 1, 0)
    assert torch.equal(flat(model), flat(expected))
    assert held_bytes(optimizer) == 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad) - 2 * 9 * 4
