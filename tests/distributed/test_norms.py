"""Norms of many tensors together, against fp64."""

import pytest
import torch

from cs336_systems.distributed.norms import joint_norm, scale_to_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float32], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
    ],
)
def test_a_norm_is_that_of_fp64(dtypes, expected):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2000, 2000), (300, 70), (), (0, 5), (4, 3, 2)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for dtype in dtypes for shape in shapes]
    tensors[1] = tensors[1].T  # not contiguous
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
    norm = joint_norm(tensors, CPU)
    assert norm.dtype == expected and norm.shape == ()
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    scale_to_norm(tensors, norm, 1.0)
    assert float(joint_norm(tensors, CPU)) == pytest.approx(1.0, rel=4e-3 if torch.bfloat16 in dtypes else 2e-6)


def test_equal_numbers_add_up():
    tensor = torch.full((4_000_000,), 0.3)
    assert float(joint_norm([tensor], CPU)) == pytest.approx(0.3 * 2000, rel=1e-5)


def test_no_tensors_have_norm_zero_and_larger_limits_change_nothing():
    assert joint_norm([], CPU) == 0
    tensor = torch.ones(4)
    scale_to_norm([tensor], joint_norm([tensor], CPU), 5.0)
    assert torch.equal(tensor, torch.ones(4))
