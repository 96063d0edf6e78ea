"""The plain operations one by one: backward against autograd of forward, and what every set of operations promises."""

import pytest
import torch

from cs336_systems.blocks import REFERENCE
from cs336_systems.model import REFERENCE_OPS

from .cases import LLAMA, tables

EPS = 1e-5


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_rms_norm():
    x, branch, dy, dresidual = draw(4, 7, 6).requires_grad_()
    gain = draw(6).requires_grad_()
    y, rstd = REFERENCE.rms_norm_forward(x, gain, EPS)
    expected = REFERENCE_OPS.rms_norm(x, gain, EPS)
    close(y, expected)
    close(rstd, (x.square().mean(-1) + EPS).rsqrt())
    dx, dgain = torch.autograd.grad(expected, (x, gain), dy)
    close(REFERENCE.rms_norm_backward(dy, x, gain, rstd, dresidual), (dx + dresidual, dgain))
    residual, y, rstd = REFERENCE.add_rms_norm_forward(x, branch, gain, EPS)
    assert torch.equal(residual, x + branch)
    assert all(map(torch.equal, (y, rstd), REFERENCE.rms_norm_forward(residual, gain, EPS)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_swiglu(dtype):
    gate_up, dproduct = draw(5, 16, dtype=dtype).requires_grad_(), draw(5, 8, dtype=dtype)
    expected = REFERENCE_OPS.swiglu(*gate_up.chunk(2, dim=-1))
    multiplied = torch.empty_like(gate_up)
    assert torch.equal(REFERENCE.swiglu_product_(multiplied, torch.eye(5, dtype=dtype), gate_up.detach().T), expected)
    assert torch.equal(multiplied, gate_up)
    gradient, product = gate_up.detach().clone(), dproduct.clone()
    REFERENCE.swiglu_backward_(product, gradient, with_product=True)
    assert torch.equal(product, expected)
    if dtype == torch.float64:
        close(gradient, torch.autograd.grad(expected, gate_up, dproduct)[0])
    again, untouched = gate_up.detach().clone(), dproduct.clone()
    REFERENCE.swiglu_backward_(untouched, again, with_product=False)
    assert torch.equal(again, gradient)
    assert torch.equal(untouched, dproduct)


def test_rotation_there_and_back():
    cos, sin = tables(LLAMA, 9, torch.float64)
    n_heads, n_kv_heads, d_head = LLAMA.n_heads, LLAMA.kv_heads, LLAMA.d_head
    before = draw(2, 9, (n_heads + 2 * n_kv_heads) * d_head)
    after = before.clone()
    REFERENCE.rotate_(after, cos, sin, n_heads, n_kv_heads, inverse=False)
    heads, rotated = (x.view(2, 9, -1, d_head).transpose(1, 2) for x in (before, after))
    turning = n_heads + n_kv_heads
    close(rotated[:, :turning], REFERENCE_OPS.rotary(heads[:, :turning], cos, sin))
    assert torch.equal(rotated[:, turning:], heads[:, turning:])
    q, keys_values = (x.contiguous() for x in before.split([n_heads * d_head, 2 * n_kv_heads * d_head], dim=-1))
    REFERENCE.rotate_(q, cos, sin, n_heads, 0, inverse=False)
    REFERENCE.rotate_(keys_values, cos, sin, 0, n_kv_heads, inverse=False)
    assert torch.equal(torch.cat((q, keys_values), dim=-1), after)
    REFERENCE.rotate_(after, cos, sin, n_heads, n_kv_heads, inverse=True)
    close(after, before)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("n_positions", [1, 13])
def test_attention(n_heads, n_kv_heads, n_positions):
    shape = (2, n_positions, n_heads + 2 * n_kv_heads, 8)
    sizes = (n_heads, n_kv_heads, n_kv_heads)
    q, k, v = (x.requires_grad_() for x in draw(*shape).transpose(1, 2).split(sizes, dim=1))
    expected = REFERENCE_OPS.attention(q, k, v, causal=True)
    o, lse = REFERENCE.attention_forward(q, k, v)
    close(o, expected)
    assert lse.shape == o.shape[:3]
    do = draw(2, n_heads, n_positions, 8)
    gradients = torch.empty(shape, dtype=torch.float64).transpose(1, 2)
    with torch.no_grad():
        REFERENCE.attention_backward(do, q, k, v, o, lse, gradients.split(sizes, dim=1))
    close(gradients.split(sizes, dim=1), torch.autograd.grad(expected, (q, k, v), do))
