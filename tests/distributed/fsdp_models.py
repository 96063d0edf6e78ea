"""Modules that hold what FSDP stumbles over, each beside its copy in one process, and how the two are compared."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.model.transformer import TransformerBlock

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
"""Some thousand roundings of fp64."""


class Block(nn.Module):
    """x -> x + a two-layer network of norm(x); d is odd, so that no world divides it."""

    def __init__(self, d, **kwargs):
        super().__init__()
        self.norm = nn.LayerNorm(d, **kwargs)
        self.up = nn.Linear(d, 3 * d, **kwargs)
        self.down = nn.Linear(3 * d, d, **kwargs)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Ids (batch, seq) -> scores (batch, seq, 11): embedding, four blocks, head, by default tied to the embedding."""

    def __init__(self, d=7, n_blocks=4, tied=True, **kwargs):
        super().__init__()
        self.embedding = nn.Embedding(11, d, **kwargs)
        self.blocks = nn.ModuleList(Block(d, **kwargs) for _ in range(n_blocks))
        self.head = nn.Linear(d, 11, bias=False, **kwargs)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Menagerie(nn.Module):
    """Ids (batch, seq) -> (batch, seq, 1), through every kind of parameter and of use.

    A row that most ranks have nothing of; a module run twice; frozen, unused and tied weights; a parameter that
    depends on the call; weights that a parent reads; nested outputs; an LSTM's flat weights.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.twice = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.pair = Pair()
        self.scale = nn.Parameter(torch.rand(6))
        self.offset = nn.Parameter(torch.rand(()))
        self.one_row = nn.Linear(6, 1)
        self.register_buffer("shift", torch.rand(6))

    def forward(self, ids, second=True):
        x = self.twice(self.embedding(ids)) + self.shift
        x = torch.tanh(self.frozen(self.twice(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.recurrent(x)[0]
        parts = self.pair(x, second)
        return self.one_row(parts["sum"] * self.scale + self.offset + parts["more"].tensors[0])


@dataclass
class More:
    """A unit may return it, though it is no container that pytree knows."""

    tensors: list[torch.Tensor]


class Pair(nn.Module):
    """Two matrices of which a call may leave out the second; returns tensors in a dict and a dataclass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 6))
        self.second = nn.Parameter(torch.randn(6, 6))

    def forward(self, x, second):
        y = torch.tanh(x @ self.first)
        return {"sum": torch.tanh(y @ self.second) if second else y, "more": More([y])}


def by_blocks(module):
    return isinstance(module, (Block, TransformerBlock))


def sharded(make, *arguments, dtype=torch.float64, **options):
    """A seeded module, and its copy under FSDP."""
    torch.manual_seed(0)
    reference = make().to(dtype)
    return reference, FSDP(copy.deepcopy(reference), *arguments, **options)


def batches(n, n_words=11, shape=(4, 5)):
    """Ids, the same numbers on every device."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(n_words, shape, generator=generator, device="cpu") for _ in range(n)]
    return [ids.to(torch.get_default_device()) for ids in drawn]


def own_rows(batch, rank):
    return batch.chunk(rank.world_size)[rank.rank]


def loss_of(scores, targets):
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def both(reference, fsdp, rank, ids, *arguments):
    """A forward and a backward on each side."""
    loss_of(reference(ids, *arguments), ids).backward()
    loss_of(fsdp(own_rows(ids, rank), *arguments), own_rows(ids, rank)).backward()


def zero_grad(*modules):
    for module in modules:
        module.zero_grad()


def check_gradients(fsdp, reference, **tolerance):
    """Ours are the reference's, and nothing is left whole."""
    for name, gradient in full_gradients(fsdp).items():
        expected = reference.get_parameter(name).grad
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, **(tolerance or CLOSE))
    assert not whole_groups(fsdp)
    assert all(p.unsharded_param.grad is None for group in fsdp.groups for p in group.parameters)
    assert {p.data_ptr() for p in fsdp.parameters()} == {p.sharded_param.data_ptr() for p in fsdp.managed_parameters()}


def whole_groups(fsdp):
    """The numbers of the groups that are gathered."""
    return [i for i, group in enumerate(fsdp.groups) if group.unsharded_bytes]


def full_gradients(fsdp):
    """Every gradient whole, by name; None where there is none."""
    found = {}
    for parameter in fsdp.managed_parameters():
        gradient = None if parameter.sharded_param.grad is None else parameter.sharded_param.grad.clone()
        if gradient is not None and gradient.dim() > 1:
            rows = -(-parameter.shape[0] // dist.get_world_size())
            padded = gradient.new_zeros(rows, *parameter.shape[1:])
            padded[: len(gradient)] = gradient
            parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, padded)
            gradient = torch.cat(parts)[: parameter.shape[0]]
        found |= dict.fromkeys(parameter.names, gradient)
    return found
