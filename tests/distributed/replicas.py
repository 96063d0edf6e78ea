"""What the tests of data parallelism compare: a replica's gradients, and what they should be, on every rung."""

import torch
import torch.distributed as dist

from .test_ddp import LADDER


def run_on_every_rung(rank, checks):
    """All checks, functions of a rung's constructor; what fails ends the ranks with the check's own traceback."""
    with rank.device:
        for i, wrap in enumerate(LADDER.values()):
            for check in checks:
                torch.manual_seed(10 * i + rank.rank)
                check(wrap, rank)


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def averaged(tensor, group=None):
    """The mean of a tensor over the ranks of a group."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def local_gradients(model, loss):
    """The gradients of a loss on this rank alone, without hooks."""
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad(loss, params)


def backward(model, *inputs):
    model(*inputs).square().sum().backward()
