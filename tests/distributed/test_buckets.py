"""Buckets without ranks: which tensors share one, and where the gradients lie before and after they are gathered."""

import math

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.distributed.buckets import Bucket, partition


def bucket_of(parameters, **how):
    return Bucket(parameters, dict.fromkeys(parameters, "named"), **how)


def parameters_with_gradients(*shapes):
    """fp32 parameters, with gradients of ones, twos, threes, ..."""
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for i, parameter in enumerate(made):
        parameter.grad = torch.full_like(parameter, float(i + 1))
    return made


def test_a_group_holds_one_dtype_and_at_most_its_capacity_or_a_single_larger_tensor():
    tensors = [torch.zeros(n) for n in (1, 2, 3, 4)]
    for capacity, groups in (
        (0, [[1], [2], [3], [4]]),
        (12, [[1, 2], [3], [4]]),
        (28, [[1, 2, 3], [4]]),  # 4 + 8 + 12 = 24, and 16 more do not fit
        (math.inf, [[1, 2, 3, 4]]),
    ):
        assert [[t.numel() for t in group] for group in partition(tensors, capacity)] == groups
    tensors[1] = tensors[1].bfloat16()  # groups are ordered by their last tensor
    assert [[t.numel() for t in group] for group in partition(tensors, 17)] == [[2], [1, 3], [4]]


def test_gathered_gradients_are_views_at_their_offsets_and_a_missing_one_counts_as_zeros():
    parameters = parameters_with_gradients((2, 3), (), (4,))
    parameters[1].grad = None
    assert bucket_of(parameters).gather().tolist() == [1.0] * 6 + [0.0] + [3.0] * 4
    flat = bucket_of(parameters, offsets=[0, 8, 12], numel=24).gather()
    flat.mul_(2)
    assert len(flat) == 24
    assert [p.grad.flatten()[0].item() for p in parameters] == [2.0, 0.0, 6.0]
    assert [p.grad.shape for p in parameters] == [p.shape for p in parameters]
    alive = StorageWeakRef(flat.untyped_storage())
    del flat
    assert not alive.expired()
    for parameter in parameters:
        parameter.grad = None
    assert alive.expired()


def test_one_gradient_travels_from_where_it_lies_unless_others_read_it_too():
    (parameter,) = parameters_with_gradients((3, 2))
    place = parameter.grad.data_ptr()
    assert bucket_of([parameter]).gather().data_ptr() == place
    assert bucket_of([parameter], numel=32).gather().numel() == 32
    shared = torch.ones(6)
    parameter.grad = shared.view(3, 2)
    assert bucket_of([parameter]).gather().data_ptr() != shared.data_ptr()


def test_autograd_gives_a_parameter_memory_that_the_rest_of_backward_reads():
    linear, shift = nn.Linear(5, 5), nn.Parameter(torch.rand(5))

    def gather_and_spoil(parameter):
        bucket_of([parameter]).gather().fill_(7)

    shift.register_post_accumulate_grad_hook(gather_and_spoil)
    output = (linear(torch.ones(1, 5)) + shift.view(1, 5)).square().sum()
    (expected,) = torch.autograd.grad(output, [linear.bias], retain_graph=True)
    output.backward()
    assert shift.grad[0] == 7
    assert torch.equal(linear.bias.grad, expected)


def test_memory_formats_are_kept():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.randn(5, 7).t())
    x = torch.randn(2, 3, 4, 4)
    (nn.functional.conv2d(x, weight).square().sum() + transposed.square().sum()).backward()
    expected = [weight.grad.clone(), transposed.grad.clone()]
    bucket = bucket_of([weight, transposed])
    bucket.gather()
    assert all(torch.equal(p.grad, g) for p, g in zip(bucket.parameters, expected, strict=True))
    assert [p.grad.stride() for p in bucket.parameters] == [weight.stride(), transposed.stride()]
