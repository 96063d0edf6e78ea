"""Which tensors are neighbours, and where flat buffers and gathered parameters put them."""

import pytest
import torch
from torch import nn

from cs336_systems.distributed.buckets import empty_like_run, neighbours
from cs336_systems.distributed.shards import Member, owned_buckets, runs_of, scattered_buckets


def numbers(tensors) -> list[list[int]]:
    """The runs, as positions among the tensors."""
    position = {id(tensor): i for i, tensor in enumerate(tensors)}
    return [[position[id(tensor)] for tensor in run] for run in neighbours(tensors)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_neighbours_fill_one_storage_as_rows_of_one_matrix(device):
    def memory(*shape):
        return torch.zeros(*shape, device=device)

    alone, matrix, vector = memory(3, 2), memory(9, 4), memory(7)
    first, second, third = matrix.split([2, 3, 4])
    left, right = vector.split([5, 2])
    assert numbers([first, second, third, left, right]) == [[0, 1, 2], [3, 4]]
    assert numbers([third, alone, right, first, left, second]) == [[3, 5, 0], [1], [4, 2]]  # in the order of memory
    assert numbers([second, alone, first]) == [[0], [1], [2]], "a part of the storage is somebody else's"
    assert numbers([matrix[:6], matrix[5:]]) == [[0], [1]], "overlap"
    assert numbers([matrix[:4], matrix[5:]]) == [[0], [1]], "a gap"
    assert numbers([first, matrix[2:].view(14, 2)]) == [[0], [1]], "rows of other lengths"
    assert numbers([vector[:6], vector[6]]) == [[0], [1]], "a scalar is no row"
    assert numbers([matrix[:, :2], matrix[:, 2:]]) == [[0], [1]], "columns"


def test_new_memory_keeps_neighbours():
    run = [nn.Parameter(rows) for rows in torch.empty(9, 4, device="meta").split([2, 3, 4])]
    made = empty_like_run(run, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert [tensor.shape for tensor in made] == [parameter.shape for parameter in run]
    assert neighbours(made) == [made]
    version = made[1]._version
    made[0].zero_()
    assert made[1]._version == version, "to autograd a change of one is none of the other"


def merged_parameters() -> list[nn.Parameter]:
    """A matrix, three that lie together (numbers 1, 3 and 4), two vectors that do (5 and 2), and one that is frozen."""
    first, second, third = torch.randn(13, 3).split([2, 4, 7])
    left, right = torch.randn(7).split([5, 2])
    values = (torch.randn(3, 5), first, right, second, third, left, torch.randn(11))
    return [nn.Parameter(value, requires_grad=i != 6) for i, value in enumerate(values)]


@pytest.mark.parametrize(("world_size", "bucket_bytes"), [(1, 10**6), (2, 200), (3, 1)])
def test_flat_buffers_keep_neighbours(world_size, bucket_bytes):
    parameters = merged_parameters()
    values = [parameter.detach().clone() for parameter in parameters]
    before = numbers(parameters)
    assert before == [[0], [1, 3, 4], [5, 2], [6]]
    ends = dict.fromkeys(parameters, 0)
    for rank in range(world_size):
        for bucket in scattered_buckets(runs_of(parameters), Member(rank, world_size), bucket_bytes):
            shard = bucket.flat.numel() // world_size
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                assert parameter.data_ptr() == bucket.flat[offset:].data_ptr()
                if piece := bucket.own.get(parameter):
                    assert piece.start == ends[parameter]
                    assert piece.tensor.data_ptr() == bucket.flat[offset + piece.start :].data_ptr()
                    ends[parameter] += piece.tensor.numel()
                    assert rank * shard <= offset + piece.start < offset + ends[parameter] <= (rank + 1) * shard
        assert numbers(parameters) == before
        assert all(map(torch.equal, parameters, values))
    assert ends == {parameter: parameter.numel() for parameter in parameters}


def test_neighbours_have_one_owner_and_what_is_frozen_in_part_comes_apart():
    parameters = merged_parameters()
    owner = {
        parameter: rank
        for rank in range(3)
        for bucket in owned_buckets(runs_of(parameters), Member(rank, 3), 10**6, [0, 0, 0])
        for parameter in bucket.own
    }
    assert owner[parameters[1]] == owner[parameters[3]] == owner[parameters[4]]
    assert owner[parameters[5]] == owner[parameters[2]]
    assert len(set(owner.values())) == 3
    parameters = merged_parameters()
    parameters[3].requires_grad_(False)
    assert [len(run) for run in runs_of(parameters)] == [1, 1, 2, 1, 1, 1]
