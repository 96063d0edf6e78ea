"""Each reference operation against an independent formula in fp64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.model.ops import attention, embedding, linear, rms_norm, rotary, swiglu


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def relative_error(actual: Tensor, oracle: Tensor) -> float:
    """Norm of the difference over the norm of the fp64 oracle."""
    return (torch.linalg.vector_norm(actual.double() - oracle) / torch.linalg.vector_norm(oracle)).item()


def assert_equal_in_fp64(actual: Tensor, expected: Tensor) -> None:
    """Equal but for rounding: the sums here have below 200 terms, and 200 roundings of 2^-53 are 2.2e-14."""
    assert actual.dtype == expected.dtype == torch.float64
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < 2.2e-14


def angles(n_positions: int, d_head: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin (n_positions, d_head / 2) of positions that start at ``first``, theta 100."""
    frequencies = torch.tensor([100.0 ** (-2 * pair / d_head) for pair in range(d_head // 2)], dtype=torch.float64)
    positions = torch.arange(first, first + n_positions, dtype=torch.float64)
    return torch.outer(positions, frequencies).cos(), torch.outer(positions, frequencies).sin()


def test_causal_attention_aligns_its_mask_to_the_last_key():
    q, k, v = randn(1, 2, 3, 8, seed=1), randn(1, 2, 7, 8, seed=2), randn(1, 2, 7, 8, seed=3)
    full = attention(torch.cat((randn(1, 2, 4, 8, seed=4), q), dim=2), k, v, causal=True)
    assert_equal_in_fp64(attention(q, k, v, causal=True), full[:, :, 4:])


def test_attention_survives_scores_that_overflow_exp():
    q, k, v = 100 * randn(1, 1, 5, 16, seed=1), 100 * randn(1, 1, 5, 16, seed=2), randn(1, 1, 5, 16, seed=3)
    assert torch.exp((q @ k.mT / 4).max()).isinf()
    assert_equal_in_fp64(attention(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_rms_norm_and_its_gradients_match_torch():
    eps = 0.5
    x = randn(3, 5, 24, seed=1).requires_grad_()
    weight = (1 + 0.3 * randn(24, seed=2)).requires_grad_()
    upstream = randn(3, 5, 24, seed=3)
    actual, expected = rms_norm(x, weight, eps), F.rms_norm(x, (24,), weight, eps)
    assert_equal_in_fp64(actual, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, weight), upstream) for y in (actual, expected)), strict=True):
        assert_equal_in_fp64(ours, theirs)


def test_rotary_is_a_complex_product_of_the_two_halves():
    x, (cos, sin) = randn(2, 3, 6, 8), angles(6, 8)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    assert_equal_in_fp64(rotary(x, cos, sin), torch.cat((turned.real, turned.imag), dim=-1))


def test_rotary_rotates_bf16_in_fp32():
    x, (cos, sin) = randn(1, 1, 64, 8, dtype=torch.bfloat16), angles(64, 8)
    rounded_once = rotary(x.float(), cos.float(), sin.float()).to(torch.bfloat16)
    assert torch.equal(rotary(x, cos.float(), sin.float()), rounded_once)


def test_swiglu_linear_and_embedding_match_their_formulas():
    gate, up = randn(5, 7, seed=1), randn(5, 7, seed=2)
    assert_equal_in_fp64(swiglu(gate, up), gate / (1 + torch.exp(-gate)) * up)
    x, weight, bias = randn(2, 3, 5, seed=1), randn(4, 5, seed=2), randn(4, seed=3)
    product = torch.einsum("bsi,oi->bso", x, weight)
    assert_equal_in_fp64(linear(x, weight), product)
    assert_equal_in_fp64(linear(x, weight, bias), product + bias)
    rows = torch.stack([torch.stack([weight[3], weight[0]]), torch.stack([weight[3], weight[2]])])
    assert torch.equal(embedding(torch.tensor([[3, 0], [3, 2]]), weight), rows)
