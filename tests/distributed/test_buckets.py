"""Buckets without ranks: which tensors share one, and where the gradients lie before and after they are gathered."""

import math

import pytest
import torch
from torch import nn

from cs336_systems.distributed.buckets import Bucket, partition


def parameters_with_gradients(*shapes):
    """fp32 parameters whose gradients count on from one to the next."""
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for i, parameter in enumerate(made):
        parameter.grad = torch.full_like(parameter, float(i + 1))
    return made


@pytest.mark.parametrize(
    ("capacity", "groups"),
    [
        (0, [[1], [2], [3], [4]]),
        (12, [[1, 2], [3], [4]]),
        (28, [[1, 2, 3], [4]]),  # 4 + 8 + 12 = 24, and 16 more do not fit
        (math.inf, [[1, 2, 3, 4]]),
    ],
)
def test_a_group_holds_at_most_its_capacity_or_a_single_larger_tensor(capacity, groups):
    tensors = [torch.zeros(n) for n in (1, 2, 3, 4)]
    assert [[t.numel() for t in group] for group in partition(tensors, capacity)] == groups


def test_dtypes_do_not_mix_and_groups_are_ordered_by_their_last_tensor():
    tensors = [
        torch.zeros(n, dtype=dtype) for n, dtype in ((1, torch.float32), (2, torch.bfloat16), (3, torch.float32))
    ]
    assert [[t.numel() for t in group] for group in partition(tensors, math.inf)] == [[2], [1, 3]]


def test_gathered_gradients_are_views_and_stay_so():
    parameters = parameters_with_gradients((2, 3), (), (4,))
    bucket = Bucket(parameters)
    flat = bucket.gather()
    assert flat.tolist() == [1.0] * 6 + [2.0] + [3.0] * 4
    flat.mul_(2)
    assert [p.grad.flatten()[0].item() for p in parameters] == [2.0, 4.0, 6.0]
    assert [p.grad.shape for p in parameters] == [p.shape for p in parameters]
    again = bucket.gather()
    assert again.data_ptr() == flat.data_ptr()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert bucket.gather().tolist() == [1.0] * 11
    assert flat[0] == 2.0


def test_a_gradient_that_lies_alone_stays_where_it_is_though_a_collective_still_holds_it():
    (parameter,) = parameters_with_gradients((4,))
    bucket = Bucket([parameter])
    flat = bucket.gather()
    held = [flat.untyped_storage(), flat.view(2, 2)]
    assert bucket.gather().data_ptr() == flat.data_ptr() == parameter.grad.data_ptr() == held[0].data_ptr()


def test_a_missing_gradient_counts_as_zeros():
    parameters = parameters_with_gradients((2,), (3,))
    parameters[0].grad = None
    assert Bucket(parameters).gather().tolist() == [0.0, 0.0, 2.0, 2.0, 2.0]
    assert parameters[0].grad.tolist() == [0.0, 0.0]


def test_memory_goes_with_the_gradients():
    parameters = parameters_with_gradients((2,), (3,))
    bucket = Bucket(parameters)
    alive = torch.multiprocessing.reductions.StorageWeakRef(bucket.gather().untyped_storage())
    assert not alive.expired()
    for parameter in parameters:
        parameter.grad = None
    assert alive.expired()


def test_one_gradient_travels_from_where_it_lies_unless_others_read_it_too():
    (parameter,) = parameters_with_gradients((3, 2))
    place = parameter.grad.data_ptr()
    assert Bucket([parameter]).gather().data_ptr() == place
    shared = torch.ones(6)
    parameter.grad = shared.view(3, 2)
    assert Bucket([parameter]).gather().data_ptr() != shared.data_ptr()


def test_autograd_gives_a_parameter_memory_that_the_rest_of_backward_reads():
    linear, shift = nn.Linear(5, 5), nn.Parameter(torch.rand(5))
    places = []

    def gather_and_spoil(parameter):
        flat = Bucket([parameter]).gather()
        places.append(flat.data_ptr())
        flat.fill_(7)

    shift.register_post_accumulate_grad_hook(gather_and_spoil)
    output = (linear(torch.ones(1, 5)) + shift.view(1, 5)).square().sum()
    (expected,) = torch.autograd.grad(output, [linear.bias], retain_graph=True)
    output.backward()
    assert len(places) == 1
    assert torch.equal(linear.bias.grad, expected)


def test_ordinary_gradients_are_not_copied():
    model = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    in_place = []

    def gather(parameter):
        in_place.append(Bucket([parameter]).gather().data_ptr() == parameter.grad.data_ptr() == before[parameter])

    before = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: before.update({p: p.grad.data_ptr()}))
        parameter.register_post_accumulate_grad_hook(gather)
    model(torch.tensor([[1, 2]])).square().sum().backward()
    assert in_place == [True] * 5


def test_memory_formats_are_kept():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.randn(5, 7).t())
    x = torch.randn(2, 3, 4, 4)
    (nn.functional.conv2d(x, weight).square().sum() + transposed.square().sum()).backward()
    expected = [weight.grad.clone(), transposed.grad.clone()]
    bucket = Bucket([weight, transposed])
    flat = bucket.gather()
    assert all(torch.equal(p.grad, g) for p, g in zip(bucket.parameters, expected, strict=True))
    assert [p.grad.stride() for p in bucket.parameters] == [weight.stride(), transposed.stride()]
    assert bucket.gather().data_ptr() == flat.data_ptr()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="must be dense"):
        Bucket([table.weight]).gather()
