"""Cross entropy against torch's in fp64, at ordinary and at enormous logits.

In narrower dtypes the budget is the error that torch's own ``F.cross_entropy`` makes in that dtype.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs336_systems.training import cross_entropy


def batch(shape: tuple[int, ...], vocab_size: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """fp64 logits (*shape, vocab_size) and targets (*shape)."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, vocab_size, dtype=torch.float64, generator=generator)
    return logits, torch.randint(vocab_size, shape, generator=generator)


def torch_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def value_and_gradient(loss_function, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = loss_function(leaf, targets)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def relative_error(actual: Tensor, oracle: Tensor) -> float:
    return (torch.linalg.vector_norm(actual.double() - oracle) / torch.linalg.vector_norm(oracle)).item()


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    vocab_size=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_are_torchs_in_fp64(shape, vocab_size, seed):
    logits, targets = batch(shape, vocab_size, seed)
    loss, gradient = value_and_gradient(cross_entropy, logits, targets)
    expected_loss, expected_gradient = value_and_gradient(torch_cross_entropy, logits, targets)
    assert loss.shape == () and loss.dtype == gradient.dtype == torch.float64
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_in_narrow_dtypes_stays_within_torchs_own(dtype):
    """Summed over batches, since a single rounding may happen to vanish; both sides see the same rounded logits.

    Ours may add one rounding: the log-sum-exp is kept in fp32, and half an ulp of it scales a row's probabilities.
    """
    ours, theirs, one_rounding = torch.zeros(2), torch.zeros(2), 0.0
    for seed in range(20):
        logits, targets = batch((4, 9), 203, seed)
        narrow = logits.to(dtype)
        oracle = value_and_gradient(torch_cross_entropy, narrow.double(), targets)
        for errors, loss_function in ((ours, cross_entropy), (theirs, torch_cross_entropy)):
            found = value_and_gradient(loss_function, narrow, targets)
            assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype) or loss_function is not cross_entropy
            errors += torch.tensor([relative_error(*pair) for pair in zip(found, oracle, strict=True)])
        one_rounding += 2**-24 * narrow.double().logsumexp(-1).abs().max().item()
    print(
        f"{dtype}, loss and gradient: ours {ours.tolist()}, F.cross_entropy {theirs.tolist()}, lse {one_rounding:.1e}"
    )
    assert theirs.min() > 0
    assert (ours <= theirs + one_rounding).all()


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 6e4), (torch.bfloat16, 1e30), (torch.float32, 1e4), (torch.float64, 1e300)]
)
def test_enormous_logits_overflow_nowhere(dtype, size):
    """One logit of +size, one of -size, the rest zero; each in turn is the target."""
    logits = torch.zeros(3, 5, dtype=dtype)
    logits[:, 1], logits[:, 3] = size, -size
    large = logits[0, 1].double()
    losses = []
    for target, (expected, share) in {1: (0.0, 0.0), 0: (large, -1 / 3), 3: (2 * large, -1 / 3)}.items():
        targets = torch.full((3,), target)
        loss, gradient = value_and_gradient(cross_entropy, logits, targets)
        losses.append(loss.double())
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()
        assert loss.double() == pytest.approx(float(expected), rel=1e-6)
        assert gradient[:, target].double().tolist() == pytest.approx([share] * 3, rel=torch.finfo(dtype).eps)
    assert losses[0] < losses[1] < losses[2]


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 4\) do not match logits \(2, 3, 5\)"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))
