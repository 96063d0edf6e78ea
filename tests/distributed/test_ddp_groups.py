"""Data parallelism in a group of its own: of some of the ranks, and of NCCL kernels with few thread blocks."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.ddp import BucketedDDP
from cs336_systems.distributed.process_group import Rank, alone, limited_group

from .checks import on_each, on_gpus, on_ranks
from .toys import RUNGS, Toy, averaged, backward, gradients


def check_pairs_average_apart(rank: Rank):
    """Ranks 0 and 2 hold one replica, 1 and 3 another; the second pair trains once more, while the first does not."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, first = groups[rank.rank % 2], rank.rank % 2
    for wrap in RUNGS:
        module = Toy()
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(rank.rank)
        model = wrap(module, process_group=group)
        assert all((tensor == first).all() for tensor in (*module.parameters(), *module.buffers()))
        torch.manual_seed(rank.rank)
        for parameter in module.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(first))
        for _ in range(2 + first):
            x = torch.randn(3, 6)
            params = [parameter for parameter in module.parameters() if parameter.requires_grad]
            expected = [averaged(g, group) for g in torch.autograd.grad(module(x).square().sum(), params)]
            backward(model, x)
            torch.testing.assert_close(gradients(model), expected)
            model.zero_grad()


def check_what_is_refused(rank: Rank):
    """A rank that is not in the group, and thread blocks, which are NCCL's."""
    group = dist.new_group([0])
    if rank.rank == 0:
        BucketedDDP(nn.Linear(2, 2), process_group=group)
    else:
        with pytest.raises(ValueError, match="rank 1 is not in the process group"):
            BucketedDDP(nn.Linear(2, 2), process_group=group)
    for limit, value in ((8, "gloo"), (0, "0")):
        with pytest.raises(ValueError, match=value):
            limited_group(rank, limit)


test_some_of_the_ranks = on_each(4, (check_pairs_average_apart,))
test_refusals = on_each(2, (check_what_is_refused,))


def few_thread_blocks(rank: Rank, folder):
    """The most thread blocks of an NCCL kernel by default and in two limited groups, whose gradients are the same."""
    found, expected = {}, None
    for limit in (0, 8, 2):
        torch.manual_seed(0)
        with rank.device:
            module = nn.Linear(4096, 4096)
        group = limited_group(rank, limit) if limit else None
        assert limit == 0 or group is limited_group(rank, limit)
        model = BucketedDDP(module, process_group=group)
        x = torch.randn(4, 4096, device=rank.device, generator=torch.Generator(rank.device).manual_seed(rank.rank))
        backward(model, x)
        expected = expected or [gradient.clone() for gradient in gradients(model)]
        torch.testing.assert_close(gradients(model), expected)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recording:
            backward(model, x)
            torch.cuda.synchronize()
        path = folder / f"{limit}-{rank.rank}.json"
        recording.export_chrome_trace(str(path))
        kernels = [e for e in json.loads(path.read_text())["traceEvents"] if "ncclDevKernel" in e.get("name", "")]
        found[limit] = max(kernel["args"]["grid"][0] for kernel in kernels)
    with alone(rank):
        pass
    limited_group(rank, 8)  # the one before went with the group that was left
    dist.barrier(limited_group(rank, 8))
    return found


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_few_thread_blocks(world_size, device, tmp_path):
    for most in on_ranks(few_thread_blocks, world_size, tmp_path, device=device):
        assert most[2] <= 2 < most[8] <= 8 < most[0]
