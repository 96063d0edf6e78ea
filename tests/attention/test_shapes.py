"""What attention accepts, what it refuses, and the sizes that it reads off its inputs."""

import re

import pytest
import torch

from cs336_systems.attention.shapes import AttentionShape, validate


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def test_sizes_of_one_head_and_of_grouped_heads():
    assert validate(zeros(2, 5, 8), zeros(2, 7, 8), zeros(2, 7, 8)) == AttentionShape(2, 1, 1, 5, 7, 8, four_d=False)
    shape = validate(zeros(2, 6, 5, 16), zeros(2, 3, 7, 16), zeros(2, 3, 7, 16), scale=0.5)
    assert shape == AttentionShape(2, 6, 3, 5, 7, 16, four_d=True)
    assert (shape.group, shape.offset, shape.default_scale, shape.scores) == (2, 2, 0.25, (2, 6, 5, 7))
    assert validate(zeros(1, 9, 4), zeros(1, 2, 4), zeros(1, 2, 4)).offset == -7


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (zeros(3, 4), zeros(3, 4), zeros(3, 4), "must all be .*q (3, 4)"),
        (zeros(1, 2, 3, 4), *[zeros(1, 3, 4)] * 2, "must all be .*q (1, 2, 3, 4) torch.float32 on cpu, k (1, 3, 4)"),
        (zeros(1, 0, 4), *[zeros(1, 3, 4)] * 2, "only the batch of q, k and v may be empty: q (1, 0, 4)"),
        (zeros(2, 3, 4), *[zeros(1, 3, 4)] * 2, "same batch size: q (2, 3, 4) .*, k (1, 3, 4)"),
        (zeros(1, 3, 4), zeros(1, 5, 4), zeros(1, 6, 4), "same length: .*k (1, 5, 4) .*, v (1, 6, 4)"),
        (zeros(1, 3, 4), *[zeros(1, 3, 8)] * 2, "same head dimension: q (1, 3, 4) .*, k (1, 3, 8)"),
        (zeros(1, 4, 3, 4), zeros(1, 2, 3, 4), zeros(1, 4, 3, 4), "k and v must have the same number of heads"),
        (zeros(1, 4, 3, 4), *[zeros(1, 3, 3, 4)] * 2, "must divide the query heads: q (1, 4, 3, 4) .*, k (1, 3, 3, 4)"),
        (
            zeros(1, 3, 4),
            zeros(1, 3, 4).double(),
            zeros(1, 3, 4),
            "one dtype .*: q (1, 3, 4) torch.float32 .*, k (1, 3, 4) torch.float64",
        ),
        (*[zeros(1, 3, 4).int()] * 3, "one dtype of torch.float64, .*torch.int32"),
        (zeros(1, 3, 4), zeros(1, 3, 4, device="meta"), zeros(1, 3, 4), "same device: q .* cpu, k .* meta"),
    ],
)
def test_what_does_not_fit_is_named(q, k, v, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        validate(q, k, v)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_scales_are_finite_and_positive(scale):
    x = zeros(1, 2, 3)
    with pytest.raises(ValueError, match=f"the scale must be finite and positive, got {scale}"):
        validate(x, x, x, scale=scale)
