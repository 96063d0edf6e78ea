"""Every wrapper against one process on the same global batch, with whatever a step may hold: a matrix of cells.

Ranks are started once and train all cells; each cell is a test. One process takes the ranks' rows in turn and adds what
they bring, in the order of ranks: of two ranks the same bits. Its own distance to training in fp64, on the batch as a
whole, is what any difference may be at most.
"""

import copy
import functools
import itertools
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed import FSDP, BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP, ShardedOptimizer
from cs336_systems.distributed.fsdp import clip_grad_norm_
from cs336_systems.distributed.process_group import Rank

from .checks import on_gpus, on_ranks

BUCKET = {"bucket_size_mb": 300 / 2**20}
"""Two or three tensors of the net, so that a step has several buckets."""
DDP = {
    "NaiveDDP": NaiveDDP,
    "FlatDDP": FlatDDP,
    "OverlappedDDP": OverlappedDDP,
    "BucketedDDP": functools.partial(BucketedDDP, **BUCKET),
}
FORMS = {"ShardedOptimizer": None, "reduce-scatter": "reduce-scatter", "shard": "shard"}
WRAPPERS = (*DDP, *FORMS, "FSDP", "FSDP in bf16")
STEPS = ("plain", "accumulation", "clipping", "tied", "unused", "bf16")
CELLS = list(itertools.product(WRAPPERS, STEPS))
ROUND_OTHERWISE = {
    *((wrapper, "clipping") for wrapper in ("reduce-scatter", "shard", "FSDP", "FSDP in bf16")),  # norms of shares
    ("shard", "accumulation"),  # means add up, where one process takes the mean of sums
    ("FSDP", "bf16"),  # the optimizer's vector loops end elsewhere in shards
}
"""The cells whose sums are in another order on two ranks, too."""
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
N_STEPS = 4
MAX_NORM = 0.1


class Net(nn.Module):
    """(batch, 6) and the branch of each row -> (batch, 3), through a frozen layer, a scalar, a buffer, odd shapes."""

    def __init__(self, tied):
        super().__init__()
        self.enter = nn.Linear(6, 7)
        self.first, self.second = (nn.Linear(7, 7, bias=False) for _ in range(2))
        if tied:
            self.second.weight = self.first.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.branches = nn.ParameterList(torch.randn(7, 7) / 2 for _ in range(3))
        self.scale = nn.Parameter(torch.rand(()) + 1)
        self.leave = nn.Linear(7, 3)
        self.register_buffer("mask", torch.arange(7) % 5 > 0)

    def forward(self, x, branch_of):
        x = torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.enter(x)))))) * self.mask
        x = torch.tanh(self.frozen(x))
        for number in branch_of.unique().tolist():
            x = x + (branch_of == number)[:, None] * (x @ self.branches[number])
        return self.leave(x * self.scale)


def batches(step):
    """Inputs, branches and targets of each step, 8 rows; a branch that rank 0 alone takes, one that nobody does."""
    generator = torch.Generator("cpu").manual_seed(1)
    branch_of = torch.arange(8, device="cpu") % 3
    if step == "unused":
        branch_of = (torch.arange(8, device="cpu") < 4) * (branch_of % 2)
    for _ in range(N_STEPS):
        x, y = (torch.randn(8, n, generator=generator, device="cpu") for n in (6, 3))
        yield tuple(each.to(torch.get_default_device()) for each in (x, branch_of, y))


def loss_of(model, x, branch_of, y):
    return (model(x, branch_of) - y).square().mean()


def micro_batches(step, batch, rank=0, world_size=1):
    """This rank's rows, in two parts if they are accumulated."""
    own = [each.chunk(world_size)[rank] for each in batch]
    return list(zip(*(each.chunk(2 if step == "accumulation" else 1) for each in own), strict=True))


def add(ours, theirs):
    """Two lists of gradients, of which some are missing."""
    return [a if b is None else b if a is None else a + b for a, b in zip(ours, theirs, strict=True)]


def train_alone(net, step, world_size, compute, reduce):
    """One process: gradients in ``compute``, those of matrices added up in ``reduce``; the parameters at the end."""
    optimizer = SGD(net.parameters())

    def gradients(parts):
        for x, branch_of, y in parts:
            low = copy.deepcopy(net).to(compute)
            (loss_of(low, x.to(compute), branch_of, y) / len(parts)).backward()
            yield [
                None if p.grad is None else p.grad.to(reduce if p.dim() > 1 else own.dtype)
                for p, own in zip(low.parameters(), net.parameters(), strict=True)
            ]

    for batch in batches(step):
        batch = [each.to(net.enter.weight.dtype) if each.is_floating_point() else each for each in batch]
        by_rank = [
            functools.reduce(add, gradients(micro_batches(step, batch, r, world_size))) for r in range(world_size)
        ]
        for parameter, total in zip(net.parameters(), functools.reduce(add, by_rank), strict=True):
            parameter.grad = None if total is None else (total / world_size).to(parameter.dtype)
        if step == "clipping":
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        net.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def clip_shares(optimizer):
    """By the norm of all ranks' shares."""
    gradients = optimizer.reduced_gradients()
    total = sum((gradient.square().sum() for gradient in gradients), torch.zeros(()))
    dist.all_reduce(total)
    for gradient in gradients:
        gradient.mul_((MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1))
    return total.sqrt()


def train_together(wrapper, step, net, rank):
    """Every rank on its rows; the whole parameters at the end, and the least norm that was clipped."""
    if wrapper.startswith("FSDP"):
        low = torch.bfloat16 if wrapper == "FSDP in bf16" else None
        model = FSDP(net, low, units=lambda module: isinstance(module, Net))
        optimizer = SGD(model.parameters())
        no_sync, clip = model.no_sync, functools.partial(clip_grad_norm_, model, MAX_NORM)
    else:
        form = FORMS.get(wrapper)
        model = net if form else DDP.get(wrapper, DDP["BucketedDDP"])(net)
        if wrapper in FORMS:
            kwargs = {**SGD.keywords, **BUCKET}
            optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, reduce_gradients=form, **kwargs)
        else:
            optimizer = SGD(model.parameters())
        no_sync = optimizer.no_sync if form else model.no_sync
        clip = functools.partial(nn.utils.clip_grad_norm_, list(net.parameters()), MAX_NORM)
        clip = functools.partial(clip_shares, optimizer) if form else clip
    norms = [torch.tensor(torch.inf)]
    dtype = net.enter.weight.dtype
    for batch in batches(step):
        *first, last = micro_batches(step, batch, rank.rank, rank.world_size)
        for part in (*first, last):
            x, branch_of, y = part
            with nullcontext() if part is last else no_sync():
                (loss_of(model, x.to(dtype), branch_of, y.to(dtype)) / (1 + len(first))).backward()
        if step == "clipping":
            norms.append(clip())
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, FSDP):
        whole = model.gather_full_params()
        parameters = [whole[name] for name, _ in net.named_parameters()]
    else:
        parameters = [parameter.detach() for parameter in net.parameters()]
    return parameters, min(norms).item()


class Outcome(NamedTuple):
    """How a cell ended on a rank; distances are the largest of any element."""

    apart: float
    """From one process with the same arithmetic to the ranks."""
    budget: float
    """From fp64 on the whole batch to one process."""
    same_on_all_ranks: bool
    least_norm: float
    unused_branch_moved: bool


def train_cell(rank: Rank, wrapper, step):
    torch.manual_seed(0)
    net = Net(tied=step == "tied")
    exact = train_alone(copy.deepcopy(net).double(), step, 1, torch.float64, torch.float64)
    if step == "bf16" and wrapper != "FSDP in bf16":
        net = net.to(torch.bfloat16)
    own = net.enter.weight.dtype
    compute = torch.bfloat16 if wrapper == "FSDP in bf16" else own
    reduce = own
    alone = train_alone(copy.deepcopy(net), step, rank.world_size, compute, reduce)
    names, unused = [name for name, _ in net.named_parameters()], net.branches[2].detach().clone()
    together, least_norm = train_together(wrapper, step, net, rank)
    found, same, right = (torch.cat([p.double().flatten() for p in each]) for each in (together, alone, exact))
    of_rank_0 = found.clone()
    dist.broadcast(of_rank_0, 0)
    return Outcome(
        apart=(found - same).abs().max().item(),
        budget=(same - right).abs().max().item(),
        same_on_all_ranks=torch.equal(found, of_rank_0),
        least_norm=least_norm,
        unused_branch_moved=not torch.equal(together[names.index("branches.2")], unused),
    )


def train_cells(rank: Rank, cells):
    return {cell: train_cell(rank, *cell) for cell in cells}


CELLS_OF = {
    (2, "cpu"): CELLS,
    (4, "cpu"): [cell for cell in CELLS if cell[1] in ("plain", "unused")],
    (2, "cuda"): CELLS,
}
MARKS = {(4, "cpu"): pytest.mark.slow, (2, "cuda"): on_gpus(2).marks}


@functools.cache
def outcomes(ranks):
    """The outcomes by cell, on each rank of a world of so many on a device."""
    world_size, device = ranks
    return on_ranks(train_cells, world_size, CELLS_OF[ranks], device=device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "wrapper", "step"),
    [pytest.param(ranks, *cell, marks=MARKS.get(ranks, ())) for ranks, cells in CELLS_OF.items() for cell in cells],
    ids=str,
)
def test_ranks_train_as_one_process(ranks, wrapper, step):
    rounds_otherwise = ranks != (2, "cpu") or (wrapper, step) in ROUND_OTHERWISE
    for outcome in (of_rank[wrapper, step] for of_rank in outcomes(ranks)):
        assert outcome.same_on_all_ranks
        assert outcome.apart <= (2 * outcome.budget if rounds_otherwise else 0)
        assert outcome.budget < (0.05 if "bf16" in wrapper + step else 1e-6)
        assert outcome.least_norm > MAX_NORM, "clipping bites at every step"
        assert outcome.unused_branch_moved == (step != "unused")
