"""What the tests of data parallelism compare: a replica's gradients, and what they should be, on two rungs."""

import torch
import torch.distributed as dist

from .test_ddp import LADDER

RUNGS = (LADDER["naive"], LADDER["bucketed"])
"""Gradients that travel alone after backward, and together during it: what else rungs do, they do alike."""


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
