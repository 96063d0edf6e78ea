"""What the public CS336 assignment 2 suites ask of the distributed hooks in adapters.py, in our words; two gloo ranks.

Data parallelism: ranks start from different weights and train for five steps of SGD on halves of twenty rows; a copy
on rank 0 trains on all twenty, and agrees after every step with ``torch.allclose`` as it comes. One model has frozen
parameters, the other a tied weight. The 2025 suite wants a bucket per tensor, two buckets, and one.

Sharded optimizer: ten steps of AdamW on the same data are those of the unsharded one.

FSDP (2026): three steps of SGD on halves of twenty sequences; a copy trains on all, its matrices cast to the compute
dtype for each step, its norm in fp32. Gathered parameters agree to 1e-6 absolute and 1e-4 relative in fp32, to 1e-4 in
fp16. Gradients have their parameter's shape and dtype, and those of whole parameters are equal everywhere.
"""

import copy
import functools
import itertools

import torch
from torch import nn

from cs336_systems.distributed.process_group import Rank
from cs336_systems.model.layers import Embedding, Linear
from cs336_systems.model.ops import REFERENCE_OPS

from .. import adapters
from .checks import checks_of, on_each
from .toys import same_on_all_ranks

N_EXAMPLES = 20
DDP_HOOKS = [
    (adapters.get_ddp, None, adapters.ddp_on_after_backward),
    (adapters.get_ddp_individual_parameters, None, adapters.ddp_individual_parameters_on_after_backward),
    *(
        (
            functools.partial(adapters.get_ddp_bucketed, bucket_size_mb=mb),
            adapters.ddp_bucketed_on_train_batch_start,
            adapters.ddp_bucketed_on_after_backward,
        )
        for mb in (0.0001, 0.0016, None)
    ),
]


def net(*widths: int, tied: bool) -> nn.Sequential:
    """Linear maps, the second with a frozen bias; the first and third are one weight, or a spare weight is frozen."""
    maps = [nn.Linear(a, b, bias=i == 1) for i, (a, b) in enumerate(itertools.pairwise(widths))]
    maps[1].bias.requires_grad_(False)
    model = nn.Sequential(*itertools.chain.from_iterable((linear, nn.ReLU()) for linear in maps[:-1]), maps[-1])
    if tied:
        maps[2].weight = maps[0].weight
    else:
        model.register_parameter("fixed", nn.Parameter(torch.full((2,), 2.0), requires_grad=False))
    return model


def check_data_parallel_training_is_that_of_one_process(rank: Rank):
    for (wrap, before_batch, after_backward), tied in itertools.product(DDP_HOOKS, (True, False)):
        torch.manual_seed(rank.rank)
        alone = net(10, 50, 10, 50, 5, tied=tied)
        model = wrap(copy.deepcopy(alone))
        for (name, theirs), ours in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(theirs, ours) == (rank.rank == 0 or "fixed" in name)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
        shared = torch.Generator().manual_seed(7)
        for _ in range(5):
            x, y = (torch.randn(N_EXAMPLES, n, generator=shared) for n in (10, 5))
            if before_batch:
                before_batch(model, optimizers[0])
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.mse_loss(alone(x), y).backward()
            optimizers[1].step()
            nn.functional.mse_loss(model(x.chunk(2)[rank.rank]), y.chunk(2)[rank.rank]).backward()
            after_backward(model, optimizers[0])
            optimizers[0].step()
            if rank.rank == 0:
                assert all(map(torch.allclose, alone.parameters(), model.parameters()))
        assert same_on_all_ranks(model.module.state_dict().values())


def check_ten_steps_are_those_of_the_unsharded_optimizer(rank: Rank) -> None:
    hyperparameters = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    for tied in (True, False):
        torch.manual_seed(42)
        model = net(10, 50, 10, 50, 5, tied=tied)
        expected = copy.deepcopy(model)
        sharded = adapters.get_sharded_optimizer(model.parameters(), torch.optim.AdamW, **hyperparameters)
        alone = torch.optim.AdamW(expected.parameters(), **hyperparameters)
        generator = torch.Generator().manual_seed(int(tied))
        for _ in range(10):
            x, y = torch.rand(32, 10, generator=generator), torch.rand(32, 5, generator=generator)
            for module, optimizer in ((model, sharded), (expected, alone)):
                optimizer.zero_grad()
                (y - module(x)).square().sum().backward()
                optimizer.step()
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
        assert 0 < len(sharded.state) < len(alone.state)


class WideNorm(nn.Module):
    """Root-mean-square norm that computes in fp32 and returns the dtype of its input."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(x.dtype)


def words():
    """Ids (batch, seq) -> scores (batch, seq, 100)."""
    maps = [Linear(64, 128, REFERENCE_OPS), nn.ReLU(), Linear(128, 100, REFERENCE_OPS)]
    model = nn.Sequential(Embedding(100, 64, REFERENCE_OPS), WideNorm(64), *maps)
    for module in model:
        if isinstance(module, (Linear, Embedding)):
            module.reset_parameters()
    return model


def check_fully_sharded_training_is_that_of_one_process(rank: Rank):
    def loss_of(scores, labels):
        return nn.functional.cross_entropy(scores[:, -1].float(), labels)

    for compute_dtype, absolute in ((None, 1e-6), (torch.float16, 1e-4)):
        torch.manual_seed(42)
        alone = words()
        sharded = adapters.get_fsdp(copy.deepcopy(alone), compute_dtype=compute_dtype)
        theirs, ours = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (alone, sharded))
        for _ in range(3):
            ids, labels = torch.randint(100, (N_EXAMPLES, 8)), torch.randint(100, (N_EXAMPLES,))
            theirs.zero_grad()
            ours.zero_grad()
            low = copy.deepcopy(alone)
            for module in low:
                if not isinstance(module, WideNorm):
                    module.to(compute_dtype)
            loss_of(low(ids), labels).backward()
            for parameter, cast in zip(alone.parameters(), low.parameters(), strict=True):
                parameter.grad = cast.grad.float()
            loss_of(sharded(ids.chunk(2)[rank.rank]), labels.chunk(2)[rank.rank]).backward()
            adapters.fsdp_on_after_backward(sharded, ours)
            for parameter in sharded.module.parameters():
                assert parameter.grad.shape == parameter.shape
                assert parameter.grad.dtype == parameter.dtype == torch.float32
            assert same_on_all_ranks([sharded.module[1].weight.grad])
            theirs.step()
            ours.step()
            full = adapters.fsdp_gather_full_params(sharded)
            for name, parameter in alone.named_parameters():
                assert torch.allclose(parameter, full[name], atol=absolute, rtol=1e-4), (compute_dtype, name)


test_what_the_public_suites_ask = on_each(2, checks_of(globals()))
