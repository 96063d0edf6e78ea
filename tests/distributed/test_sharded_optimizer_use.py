"""What users do with the sharded optimizer besides plain steps: counting, clearing, freezing, moving and copying.

As in test_sharded_optimizer.py, each check is a test and each rank asserts for itself.
"""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

from .checks import on_each
from .sharding_models import FORMS, TINY_BUCKETS, Toy, backward_on_all, flat, loss_of, train
from .test_sharded_optimizer import ADAMW, CollectiveLog, sharded


class CountingSGD(torch.optim.SGD):
    """Adds a key to its groups and an entry to a list that ``step`` is given, and takes no closure."""

    def step(self, calls):
        super().step()
        calls.append(1)
        for group in self.param_groups:
            group["counted"] = True


def closures_keywords_and_new_keys(rank: Rank) -> None:
    for form in FORMS:
        model, reference = Toy(), Toy()
        optimizer = sharded(model, form)
        alone = torch.optim.AdamW(reference.parameters(), **ADAMW)

        def closure(model=model, optimizer=optimizer, form=form):
            optimizer.zero_grad()
            if form:
                loss_of(model, 3, rank.rank).backward()
            else:
                backward_on_all(model, 3, rank.world_size)
            return loss_of(model, 3, 0)

        backward_on_all(reference, 3, rank.world_size)
        alone.step()
        expected = loss_of(Toy(), 3, 0).item()
        assert optimizer.step(closure).item() == expected
        assert torch.equal(flat(model), flat(reference))

        calls: list[int] = []
        counted = ShardedOptimizer(model.parameters(), CountingSGD, reduce_gradients=form, lr=0.1)
        counted.step(calls=calls)
        assert calls
        assert counted.param_groups[0]["counted"]


class CountingAverage(torch.optim.Optimizer):
    """Descends by less at each step, which it counts in its group: as a number, in a list and in a tensor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "seen": [], "steps": torch.tensor(0)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["seen"].append(group["k"])
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["k"] = group["k"]
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (group["k"] + group["steps"].item()))


def counters_in_groups_count_steps(rank: Rank) -> None:
    """Also on a rank that owns nothing, and nothing in the last bucket."""
    for form in FORMS:
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
            for group in (optimizer.param_groups[0], alone.param_groups[0], optimizer.state_dict()["param_groups"][0]):
                assert (group["k"], group["seen"], group["steps"].item()) == (3, [1, 2, 3], 3)
            assert optimizer.param_groups[0]["lr"] is rate
            torch.testing.assert_close(flat(model), flat(reference))


def sparse_gradients_are_named(rank: Rank) -> None:
    for form in FORMS:
        table, dense = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)
        both = nn.Sequential(table, dense)
        unnamed = sharded(both, form)
        with pytest.raises(ValueError, match="the gradient of parameter 0 of group 0 must be dense to be sharded, got"):
            both(torch.tensor([1])).sum().backward()
            unnamed.step()
        del unnamed
        both.zero_grad()
        named = ShardedOptimizer(both.named_parameters(), torch.optim.SGD, reduce_gradients=form)
        with pytest.raises(ValueError, match=r"the gradient of 0.weight must be dense .* torch.sparse_coo"):
            both(torch.tensor([1])).sum().backward()
            named.step()


def what_fsdp_has_sharded_is_refused(rank: Rank) -> None:
    for form in FORMS:
        optimizer = sharded(nn.Linear(2, 2), form)
        for module in (nn.Linear(4, 3), nn.LayerNorm(4)):
            fully_sharded = FSDP(module)
            with pytest.raises(ValueError, match="sharded already, and so is the state of AdamW over them"):
                sharded(fully_sharded, form)
            with pytest.raises(ValueError, match="use it without ShardedOptimizer"):
                optimizer.add_param_group({"params": fully_sharded.parameters()})
            assert len(optimizer.param_groups) == 1


def unused_here_or_everywhere(rank: Rank) -> None:
    """No gradient anywhere: skipped, weight decay and all. None on one rank: it counts as zero there."""
    for form in ("reduce-scatter",):
        used, unused = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(40))
        optimizer = ShardedOptimizer([used, unused], torch.optim.SGD, lr=1.0, weight_decay=0.5, reduce_gradients=form)
        if rank.rank == 0:
            (4 * used).sum().backward()
        optimizer.step()
        assert torch.equal(used, torch.full((40,), 1 - 0.5 - 4 / rank.world_size))
        assert torch.equal(unused, torch.ones(40))
        optimizer.zero_grad()
        optimizer.step()  # and nothing at all without any
        assert torch.equal(unused, torch.ones(40))


def clearing_and_accumulating(rank: Rank) -> None:
    """Any way of clearing gradients, and accumulation over two batches, gives what one process gives."""
    expected = Toy()
    alone = torch.optim.AdamW(expected.parameters(), **ADAMW)
    for step in range(4):
        total = []
        for micro in (2 * step, 2 * step + 1):
            backward_on_all(expected, micro, rank.world_size)
            total.append([None if p.grad is None else p.grad.clone() for p in expected.parameters()])
        for parameter, first, second in zip(expected.parameters(), *total, strict=True):
            parameter.grad = None if first is None else first + second
        alone.step()
        alone.zero_grad()
    clears = {
        "to none": lambda model, optimizer: optimizer.zero_grad(),
        "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        "by the module": lambda model, optimizer: model.zero_grad(),
    }
    for clear in clears.values():
        model = Toy()
        optimizer = sharded(model, "reduce-scatter")
        for step in range(4):
            with optimizer.no_sync():
                loss_of(model, 2 * step, rank.rank).backward()
            loss_of(model, 2 * step + 1, rank.rank).backward()
            optimizer.step()
            clear(model, optimizer)
        torch.testing.assert_close(flat(model), flat(expected), rtol=1e-2, atol=1e-5)  # bf16 adds in another order
    model = Toy()
    optimizer = sharded(model, "reduce-scatter")
    loss_of(model, 0, rank.rank).backward()
    with pytest.raises(RuntimeError, match=re.escape("no_sync()")):
        loss_of(model, 1, rank.rank).backward()
    optimizer.zero_grad()


def later_freezing_and_moving(rank: Rank) -> None:
    for form in FORMS:
        model, expected = Toy(), Toy()
        optimizer = sharded(model, form)
        alone = torch.optim.AdamW(expected.parameters(), **ADAMW)
        for step in range(4):
            for toy in (model, expected):
                toy.frozen.requires_grad_(step >= 2)
                toy.second.weight.requires_grad_(step < 2)
            train(model, optimizer, range(step, step + 1), rank.world_size, rank.rank)
            train(expected, alone, range(step, step + 1), rank.world_size, rank.rank)
        assert torch.equal(flat(model), flat(expected))
        model.first.weight.data = model.first.weight.detach().clone()  # other memory, the same values
        train(model, optimizer, range(4, 5), rank.world_size, rank.rank)
        train(expected, alone, range(4, 5), rank.world_size, rank.rank)
        assert torch.equal(flat(model), flat(expected))
        model.double()
        with pytest.raises(ValueError, match="moved from torch.float32 on cpu to torch.float64"):
            optimizer.step()


def cleared_by_the_module_without_a_backward_since(rank: Rank) -> None:
    """Ranks send the same, whoever had a backward since ``module.zero_grad()``, and whoever had one before."""
    who = ((0, 1), (0,), (0,), (), (1,), (0, 1), (1,), (), ())
    for again in (False, True):
        model, reference = Toy(), Toy()
        optimizer = sharded(model, "reduce-scatter")
        alone = torch.optim.AdamW(reference.parameters(), **ADAMW)
        for step, ranks in enumerate(who):
            reference.zero_grad()
            for number in ranks:
                loss_of(reference, step, number).backward()
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter.grad /= rank.world_size
            if rank.rank in ranks:
                loss_of(model, step, rank.rank).backward()
            for _ in range(1 + again):
                optimizer.step()
                alone.step()
            model.zero_grad()
            assert torch.equal(flat(model), flat(reference)), step


def a_replaced_optimizer_stays_silent(rank: Rank) -> None:
    """One that others still refer to while a second has taken its parameters: only the second reduces gradients."""
    model = nn.Linear(8, 8, bias=False)
    first = sharded(model, "reduce-scatter")
    second = sharded(model, "reduce-scatter")
    for optimizer in (second, first):  # whoever steps takes the parameters back
        optimizer.step()
        optimizer.zero_grad()
        with CollectiveLog() as log:
            model(torch.ones(2, 8)).sum().backward()
        assert [name for name, _ in log.sent] == ["reduce_scatter_base"]
        optimizer.zero_grad()


def copies_are_refused(rank: Rank) -> None:
    optimizer = sharded(Toy())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="ShardedOptimizer cannot be copied or pickled"):
            attempt(optimizer)
    assert f"ShardedOptimizer of AdamW, rank {rank.rank} of 2" in repr(optimizer)


def gradients_to_be_looked_at(rank: Rank) -> None:
    """Before a step: the shares of all ranks are the whole mean gradient, and looking changes nothing."""
    looked_at, other, whole = Toy(), Toy(), Toy()
    optimizers = [sharded(model, "reduce-scatter") for model in (looked_at, other)]
    for step in range(3):
        loss_of(looked_at, step, rank.rank).backward()
        shares = optimizers[0].reduced_gradients()
        squares = torch.stack([share.double().square().sum() for share in shares]).sum()
        dist.all_reduce(squares)
        backward_on_all(whole, step, rank.world_size)
        expected = sum(p.grad.double().square().sum() for p in whole.parameters() if p.grad is not None)
        torch.testing.assert_close(squares, expected, rtol=2**-8, atol=0)  # one of them is bf16
        optimizers[0].step()
        optimizers[0].zero_grad()
        train(other, optimizers[1], range(step, step + 1), rank.world_size, rank.rank)
        assert torch.equal(flat(looked_at), flat(other))
        whole.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="this optimizer leaves gradients whole on every rank"):
        sharded(Toy()).reduced_gradients()


CHECKS = (
    closures_keywords_and_new_keys,
    counters_in_groups_count_steps,
    sparse_gradients_are_named,
    what_fsdp_has_sharded_is_refused,
    unused_here_or_everywhere,
    clearing_and_accumulating,
    later_freezing_and_moving,
    cleared_by_the_module_without_a_backward_since,
    a_replaced_optimizer_stays_silent,
    copies_are_refused,
    gradients_to_be_looked_at,
)


test_on_two_ranks = on_each(2, CHECKS)
