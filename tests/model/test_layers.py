"""Layers: initialisation, rotary tables and the order of arithmetic that each holds."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.config import ModelConfig, RopeScaling
from cs336_systems.model.layers import Embedding, Linear, RotaryEmbedding, rotary_frequencies
from cs336_systems.model.ops import REFERENCE_OPS

CONFIG = ModelConfig(name="rope", d_model=32, d_ff=32, n_layers=1, n_heads=2, context_length=40, rope_theta=500.0)


def truncated_std() -> float:
    """Standard deviation of a unit normal cut at three: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1)) = 0.9866."""
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))


def assert_truncated_normal(weight: Tensor, sigma: float) -> None:
    """Mean and std within five standard errors; every value within three sigma, and the tails up to there in use.

    The std of n draws has a relative standard error of at most 1 / sqrt(2 n), the normal's; the cut one's is smaller.
    """
    n = weight.numel()
    assert weight.std().item() == pytest.approx(truncated_std() * sigma, rel=5 / math.sqrt(2 * n))
    assert abs(weight.mean().item()) < 5 * sigma / math.sqrt(n)
    largest = weight.abs().max().item() / sigma
    assert 2.9 < largest <= 3 * (1 + 2**-22)


def test_matrices_start_as_cut_normals_of_glorots_variance_and_embeddings_of_unit_variance():
    torch.manual_seed(0)
    layer, embedding = Linear(512, 128, REFERENCE_OPS, bias=True), Embedding(1000, 64, REFERENCE_OPS)
    layer.reset_parameters()
    embedding.reset_parameters()
    assert_truncated_normal(layer.weight.detach(), sigma=math.sqrt(2 / (512 + 128)))
    assert torch.equal(layer.bias, torch.zeros(128))
    assert_truncated_normal(embedding.weight.detach(), sigma=1.0)


def test_llama3_scaling_keeps_short_waves_slows_long_ones_and_joins_them_continuously():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=100)
    plain, scaled = rotary_frequencies(CONFIG), rotary_frequencies(replace(CONFIG, rope_scaling=scaling))
    regimes = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 100 / 4.0:
            regimes.add("kept")
            assert after == before
        elif wavelength > 100 / 1.0:
            regimes.add("slowed")
            assert after == pytest.approx(before / 8.0, rel=1e-15)
        else:
            regimes.add("between")
            share = (100 / wavelength - 1.0) / (4.0 - 1.0)
            assert after == pytest.approx((1 - share) * before / 8.0 + share * before, rel=1e-14)
            assert before / 8.0 < after < before
    assert regimes == {"kept", "between", "slowed"}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_rotary_tables_are_the_fp64_angles_rounded_once(dtype):
    tables, table_dtype = (
        RotaryEmbedding(CONFIG, dtype=dtype),
        torch.float64 if dtype == torch.float64 else torch.float32,
    )
    tables.reset_parameters()
    angles = torch.outer(torch.arange(40, dtype=torch.float64), rotary_frequencies(CONFIG))
    cos, sin = tables(40)
    assert torch.equal(cos, angles.cos().to(table_dtype))
    assert torch.equal(sin, angles.sin().to(table_dtype))
    assert cos.dtype == sin.dtype == table_dtype
    assert tables(3)[0].shape == (3, 8)
    with pytest.raises(ValueError, match="41 tokens .* 40"):
        tables(41)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float64])
def test_rotary_tables_moved_to_a_dtype_equal_those_made_in_it(target):
    moved, made = RotaryEmbedding(CONFIG), RotaryEmbedding(CONFIG, dtype=target)
    moved.reset_parameters()
    made.reset_parameters()
    moved.to(target)
    assert moved.cos.dtype == made.cos.dtype == torch.promote_types(target, torch.float32)
    assert torch.equal(moved.cos, made.cos) and torch.equal(moved.sin, made.sin)
    assert not moved.state_dict()
