"""Small modules that hold what distributed wrappers stumble over. All outputs are smooth, so that parity is sharp."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.hardware import MIB

LADDER = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": functools.partial(BucketedDDP, bucket_size_mb=300 / MIB),
}
RUNGS = (LADDER["naive"], LADDER["bucketed"])
"""Gradients that travel alone after backward, and together during it: what else rungs do, they do alike."""


class Toy(nn.Module):
    """(batch, 6) -> (batch, 3), with a tied weight, a frozen one, a scalar, biases and buffers of three dtypes."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()))
        self.leave = nn.Linear(8, 3)
        self.register_buffer("offset", torch.rand(8))
        self.register_buffer("count", torch.randint(10, ()))
        self.register_buffer("mask", torch.rand(3) > 0.5)

    def forward(self, x):
        x = torch.tanh(self.enter(x)) + self.offset
        x = torch.tanh(self.second(torch.tanh(self.frozen(torch.tanh(self.first(x))))))
        return self.leave(x * self.scale)


class Branches(nn.Module):
    """A trunk and three branches of which each forward uses those it is told to: (batch, 4) -> (batch, 4)."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, used):
        x = self.trunk(x)
        return x + sum((self.branches[i](x) for i in used), torch.zeros(()))


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def averaged(tensor, group=None):
    """The mean of a tensor over the ranks of a group."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def average_of(module, loss):
    """The gradients of each rank's loss, averaged over the ranks, without hooks."""
    params = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [averaged(gradient) for gradient in torch.autograd.grad(loss, params)]


def backward(model, *inputs):
    model(*inputs).square().sum().backward()


def same_on_all_ranks(tensors):
    """Whether the tensors hold the same bits everywhere."""
    flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other, flat) for other in everyone)
