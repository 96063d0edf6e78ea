"""The sharded optimizer against one process: the same parameters, a share of the state, and no more sent than stated.

Two ranks are started once; each rank asserts for itself, and each check is a test. A bucket holds a few tensors of a
small model, so that every step has several buckets, and the ranks' shards cut tensors. Of two ranks the sum of
gradients is the same number in either order, so everything is compared bit by bit.
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.costs.sharding import state_bytes_by_rank
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.harness.traffic import MATMUL, Traffic

from .checks import checks_of, on_each
from .sharding_models import FORMS, OPTIMIZERS, TINY_BUCKETS, Toy, flat, loss_of, train

ADAMW = {"lr": 0.01, "weight_decay": 0.1}
OWNED, SCATTERED, FREED = FORMS
TWO_FORMS = (OWNED, SCATTERED)
"""The third differs from the second in steps of several backwards alone."""


def sharded(model: nn.Module, form: str | None = None, name: str = "adamw", **options) -> ShardedOptimizer:
    optimizer_cls, kwargs = OPTIMIZERS[name]
    return ShardedOptimizer(
        model.parameters(), optimizer_cls, reduce_gradients=form, **{**TINY_BUCKETS, **kwargs, **options}
    )


def matrices(n: int) -> nn.Sequential:
    """fp32 matrices of 4 KiB."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(n)))


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """State of this rank but for step counters."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )


def check_collectives_of_a_step(rank: Rank) -> None:
    """16 matrices, two to a bucket: every byte is sent as stated, none besides but a byte a parameter."""
    for form in FORMS:
        model = matrices(16)
        optimizer = sharded(model, form, bucket_size_mb=8192 / 1024**2)
        for _ in range(2):
            with Traffic() as backward:
                model(torch.ones(2, 32)).sum().backward()
            with CommDebugMode() as counted, Traffic() as step:
                optimizer.step()
            optimizer.zero_grad()
        sent, scattered = ([(event.kind, event.n_bytes) for event in log.sent] for log in (step, backward))
        if form is OWNED:
            assert (scattered, sent) == ([], [("broadcast", 8192)] * 8)
        else:
            assert scattered == [("_reduce_scatter_base", 8192 // rank.world_size)] * 8
            assert sent == [("allreduce", 16)] + [("_allgather_base", 8192)] * 8
            kinds = [event.kind for event in backward.events]
            assert MATMUL in kinds[kinds.index("_reduce_scatter_base") :]  # it starts under backward
        assert counted.get_total_counts() == len(sent)


def check_whole_gradients_are_freed_and_backwards_add_up(rank: Rank) -> None:
    """Two of 8 buckets are whole at most, then none; two backwards are their sum, whatever a rank used in them."""
    model = matrices(8)
    other = copy.deepcopy(model)
    optimizer = sharded(model, FREED, bucket_size_mb=4096 / 1024**2)
    twin = sharded(other, SCATTERED, bucket_size_mb=4096 / 1024**2)
    whole, sent = [], []

    def count(parameter: nn.Parameter) -> None:
        whole.append(sum(each.grad is not None for each in model.parameters()))
        whole.append(sum(not memory.expired() for memory in sent))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    reduce_scatter = dist.reduce_scatter_tensor

    def note(shard: torch.Tensor, flat: torch.Tensor, **how) -> dist.Work:
        sent.append(StorageWeakRef(flat.untyped_storage()))
        return reduce_scatter(shard, flat, **how)

    for step in range(3):
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(step + 5 * rank.rank))
        first = rank.rank * (step == 1)  # once rank 1 has no gradient of the first layer
        with pytest.MonkeyPatch.context() as patch, optimizer.no_sync():
            patch.setattr(dist, "reduce_scatter_tensor", note)
            model[first:](x).sum().backward()
            model(x).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        with twin.no_sync(), Traffic() as log:
            other[first:](x).sum().backward()
        assert log.sent == []
        other(x).sum().backward()
        for one in (optimizer, twin):
            one.step()
            one.zero_grad()
        torch.testing.assert_close(flat(model), flat(other), rtol=1e-5, atol=1e-6)
    assert max(whole) <= 2
    everyone = [torch.empty_like(flat(model)) for _ in range(rank.world_size)]
    dist.all_gather(everyone, flat(model))
    assert torch.equal(*everyone)


def check_any_way_of_clearing(rank: Rank) -> None:
    """Gradients are used up by a step, so that it need not be told of any."""
    ends = []
    for clear in (True, False):
        model = Toy()
        optimizer = sharded(model, SCATTERED)
        for step in range(3):
            with optimizer.no_sync():
                loss_of(model, 2 * step, rank.rank).backward()
            loss_of(model, 2 * step + 1, rank.rank).backward()
            optimizer.step()
            if clear:
                model.zero_grad()
        ends.append(flat(model))
    assert all(torch.equal(end, ends[0]) for end in ends)
    loss_of(model, 8, rank.rank).backward()
    optimizer.zero_grad()
    optimizer.step()  # what was given up is not used
    assert torch.equal(flat(model), ends[0])


def check_state_is_a_share(rank: Rank) -> None:
    """As predicted, to the byte, and balanced to 3 % of the mean where tensors allow."""
    for form, predicted_form in zip(TWO_FORMS, ("owned", "scattered"), strict=True):
        for name, per_parameter in (("sgd", 1), ("ours", 2)):
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
            if form is OWNED:
                assert max(by_rank) <= 1.03 * sum(by_rank) / rank.world_size


def check_groups_and_schedulers(rank: Rank) -> None:
    """Options of groups, groups added later, and rates that a scheduler writes, all act."""
    results = []
    for form in ("alone", *TWO_FORMS):
        model = Toy()
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        rest = [p for name, p in model.named_parameters() if "." not in name]
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "lr": 0.1}]
        if form == "alone":
            optimizer = torch.optim.AdamW(groups, **ADAMW)
        else:
            optimizer = ShardedOptimizer(groups, torch.optim.AdamW, reduce_gradients=form, **TINY_BUCKETS, **ADAMW)
        optimizer.add_param_group({"params": rest, "lr": 0.02, "betas": (0.5, 0.9)})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
        for step in range(5):
            train(model, optimizer, range(step, step + 1), rank.world_size, rank.rank)
            scheduler.step()
        results.append((flat(model), [group["lr"] for group in optimizer.param_groups]))
    assert results[0][1] == pytest.approx([0.01 * 0.09, 0.1 * 0.09, 0.02 * 0.09])
    for parameters, rates in results[1:]:
        assert rates == results[0][1]
        assert torch.equal(parameters, results[0][0])


class CountingAverage(torch.optim.Optimizer):
    """Descends by less at each step, which it counts in its group: as a number and in a tensor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": torch.tensor(0)})

    @torch.no_grad()
    def step(self, calls=None):
        if calls is not None:
            calls.append(1)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["k"] = group["k"]
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (group["k"] + group["steps"].item()))


def check_counters_in_groups_count_steps(rank: Rank) -> None:
    """Also on a rank that owns nothing, and nothing in the last bucket; keywords and closures reach the optimizer."""
    for form in TWO_FORMS:
        for make in (Toy, lambda: nn.Linear(6, 6, bias=False)):
            torch.manual_seed(0)
            model = make()
            reference = copy.deepcopy(model)
            rate = torch.tensor(0.1)
            optimizer = ShardedOptimizer(
                model.parameters(), CountingAverage, reduce_gradients=form, lr=rate, **TINY_BUCKETS
            )
            alone = CountingAverage(reference.parameters())
            train(model, optimizer, range(3), rank.world_size, rank.rank)
            train(reference, alone, range(3), rank.world_size, rank.rank)
            for group in (optimizer.param_groups[0], alone.param_groups[0]):
                assert (group["k"], group["steps"].item()) == (3, 3)
            assert optimizer.param_groups[0]["lr"] is rate
            torch.testing.assert_close(flat(model), flat(reference))
        calls: list[int] = []
        assert optimizer.step(lambda: 7.0, calls=calls) == 7.0
        assert calls


def check_a_backward_on_some_ranks(rank: Rank) -> None:
    """Ranks send the same, whoever has had one; what has no gradient anywhere is skipped, weight decay and all."""
    model, reference = Toy(), Toy()
    optimizer, alone = sharded(model, SCATTERED), torch.optim.AdamW(reference.parameters(), **ADAMW)
    for step, ranks in enumerate(((0, 1), (0,), (0,), (), (1,), (0, 1), (1,), ())):  # those that have a backward
        reference.zero_grad()
        for number in ranks:
            loss_of(reference, step, number).backward()
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= rank.world_size
        if rank.rank in ranks:
            loss_of(model, step, rank.rank).backward()
        optimizer.step()
        alone.step()
        model.zero_grad()
        assert torch.equal(flat(model), flat(reference)), step


def check_later_freezing_and_moving(rank: Rank) -> None:
    for form in TWO_FORMS:
        model, expected = Toy(), Toy()
        optimizer = sharded(model, form)
        alone = torch.optim.AdamW(expected.parameters(), **ADAMW)
        for step in range(5):
            for toy in (model, expected):
                toy.frozen.requires_grad_(step >= 2)
                toy.second.weight.requires_grad_(step < 2)
            train(model, optimizer, range(step, step + 1), rank.world_size, rank.rank)
            train(expected, alone, range(step, step + 1), rank.world_size, rank.rank)
            assert torch.equal(flat(model), flat(expected))
        model.double()
        for use in (optimizer.step, optimizer.reduced_gradients)[: 1 if form is OWNED else 2]:
            with pytest.raises(ValueError, match="was moved, cast or given"):
                use()


def check_a_replaced_optimizer_stays_silent(rank: Rank) -> None:
    """One that others still refer to while a second has taken its parameters: only the second reduces gradients."""
    model = nn.Linear(8, 8, bias=False)
    first = sharded(model, SCATTERED)
    second = sharded(model, SCATTERED)
    with Traffic() as log:
        model(torch.ones(2, 8)).sum().backward()
    assert [event.kind for event in log.sent] == ["_reduce_scatter_base"]
    second.step()
    with pytest.raises(ValueError, match=r"shape \(8, 8\) was moved"):
        first.step()


def check_saved_layers_are_small(rank: Rank) -> None:
    """A layer that is saved by itself takes its own bytes, not those of the bucket that it shares with others."""
    for form in TWO_FORMS:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(300, 300), nn.Linear(0, 4))
        sharded(model, form, bucket_size_mb=1)
        assert {p.untyped_storage().nbytes() for p in model[0].parameters()} == {64, 16}


def check_constructor_errors(rank: Rank) -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    sparse, shapes = torch.eye(3).to_sparse().requires_grad_(), [nn.Parameter(torch.ones(3 + rank.rank))]
    for params, cls, options, value in (
        (weights, "SGD", {"lr": 0.1}, "'SGD'"),
        (weights, torch.optim.SGD, {"reduce_gradients": "scatter"}, "'scatter'"),
        (weights, torch.optim.SGD, {"bucket_size_mb": 0}, "0"),
        (weights, torch.optim.LBFGS, {}, "LBFGS updates all parameters together"),
        (weights, torch.optim.Adafactor, {"reduce_gradients": "shard"}, "Adafactor .* reduce_gradients='shard'"),
        ([sparse], torch.optim.SGD, {}, "torch.sparse_coo"),
        (shapes, torch.optim.SGD, {}, r"\(4,\)"),
        (weights, torch.optim.SGD, {"lr": 0.1 * (1 + rank.rank)}, r"rank 1 has .* \(lr 0.2, "),
        (nn.LazyLinear(2).parameters(), torch.optim.SGD, {}, "a parameter has no shape"),
    ):
        with pytest.raises(ValueError, match=value):
            ShardedOptimizer(params, cls, **options)
    optimizer = ShardedOptimizer(weights[:1], torch.optim.SGD, lr=0.1)
    fully_sharded = FSDP(nn.LayerNorm(4))
    for params in (weights[:1], shapes, fully_sharded.parameters()):
        with pytest.raises(ValueError):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="sharded already"):
        sharded(FSDP(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="whole on every rank"):
        optimizer.reduced_gradients()
    for attempt in (copy.deepcopy, pickle.dumps, ShardedOptimizer.state_dict):
        with pytest.raises(RuntimeError, match="save_checkpoint"):
            attempt(optimizer)


def check_clipping_is_that_of_the_whole_gradient(rank: Rank) -> None:
    whole = torch.randn(rank.world_size, 4, 32, generator=torch.Generator().manual_seed(0))
    for form in FORMS:
        for max_norm, dtype in ((1e-3, torch.float32), (1e3, torch.float32), (1e-3, torch.float64)):
            model, expected, inputs = matrices(3).to(dtype), matrices(3).to(dtype), whole.to(dtype)
            optimizer = sharded(model, form, "sgd", lr=1.0)
            alone = torch.optim.SGD(expected.parameters(), lr=1.0)
            expected(inputs.flatten(0, 1)).square().mean().backward()
            model(inputs[rank.rank] if form is not OWNED else inputs.flatten(0, 1)).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
            torch.testing.assert_close(optimizer.clip_grad_norm_(max_norm), norm)  # 1e-7 in fp64
            for each in (optimizer, alone):
                each.step()
            torch.testing.assert_close(flat(model), flat(expected), rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        optimizer.clip_grad_norm_(0)


def check_sparse_gradients_are_named(rank: Rank) -> None:
    for form in TWO_FORMS:
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
        optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, reduce_gradients=form)
        with pytest.raises(ValueError, match="0.weight.*sparse_coo"):
            model(torch.tensor([1])).sum().backward()
            optimizer.step()


test_on_two_ranks = on_each(2, checks_of(globals()))


def test_without_a_process_group_it_is_the_optimizer_itself():
    for form in TWO_FORMS:
        model, expected = Toy(), Toy()
        optimizer = sharded(model, form)
        train(model, optimizer, range(3), 1, 0)
        train(expected, torch.optim.AdamW(expected.parameters(), **ADAMW), range(3), 1, 0)
        assert torch.equal(flat(model), flat(expected))
        assert held_bytes(optimizer) == 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad) - 2 * 9 * 4
