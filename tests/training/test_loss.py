"""Cross entropy against torch's in fp64, at ordinary and at enormous logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs336_systems.training import cross_entropy


def batch(shape: tuple[int, ...], vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """fp64 logits (*shape, vocab_size) and targets (*shape)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, vocab_size, dtype=torch.float64, generator=generator)
    return logits, torch.randint(vocab_size, shape, generator=generator)


def torch_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def value_and_gradient(loss_function, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = loss_function(leaf, targets)
    loss.backward()
    return loss.detach(), leaf.grad


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    vocab_size=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_are_torchs_in_fp64(shape, vocab_size, seed):
    pairs = (
        value_and_gradient(function, *batch(shape, vocab_size, seed))
        for function in (cross_entropy, torch_cross_entropy)
    )
    torch.testing.assert_close(*pairs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 6e4), (torch.bfloat16, 1e30), (torch.float32, 1e4), (torch.float64, 1e300)]
)
def test_enormous_logits_overflow_nowhere(dtype, size):
    """One logit of +size, one of -size, the rest zero; each in turn is the target."""
    logits = torch.zeros(3, 5, dtype=dtype)
    logits[:, 1], logits[:, 3] = size, -size
    large = logits[0, 1].double()
    for target, (expected, share) in {1: (0.0, 0.0), 0: (large, -1 / 3), 3: (2 * large, -1 / 3)}.items():
        loss, gradient = value_and_gradient(cross_entropy, logits, torch.full((3,), target))
        assert loss.double() == pytest.approx(float(expected), rel=1e-6)
        assert gradient[:, target].double().tolist() == pytest.approx([share] * 3, rel=torch.finfo(dtype).eps)
        assert torch.isfinite(gradient).all()


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 4\) do not match logits \(2, 3, 5\)"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))
