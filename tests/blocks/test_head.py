"""Head and loss in chunks against torch's cross entropy of all logits, and what the model and a step do with it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.blocks import head_ops
from cs336_systems.blocks.head import linear_cross_entropy
from cs336_systems.model import REFERENCE_OPS, TransformerLM

from .cases import QWEN


def case(n_tokens: int, d: int, n_words: int, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and targets, of which every third does not count."""
    generator = torch.Generator().manual_seed(n_tokens)
    x, weight = (torch.randn(rows, d, generator=generator).to(dtype).requires_grad_() for rows in (n_tokens, n_words))
    targets = torch.randint(n_words, (n_tokens,), generator=generator)
    return x, weight, targets.where(torch.arange(n_tokens) % 3 != 1, -100)


def of_all_logits(x, weight, targets, *, z_loss=0.0, reduction="mean") -> Tensor:
    logits = x @ weight.T
    count = (targets != -100).sum() if reduction == "mean" else 1
    z = (torch.logsumexp(logits, -1).square() * (targets != -100)).sum() / count
    return F.cross_entropy(logits, targets, reduction=reduction) + z_loss * z


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.3}, {"reduction": "sum"}])
def test_loss_and_gradients_are_those_of_all_logits(options, chunk):
    x, weight, targets = case(14, 3, 11)
    found, expected = (
        linear_cross_entropy(x, weight, targets, chunk=chunk, **options),
        of_all_logits(x, weight, targets, **options),
    )
    torch.testing.assert_close(found, expected)
    for factor in (1.0, -2.5):
        gradients = (torch.autograd.grad(factor * loss, (x, weight), retain_graph=True) for loss in (found, expected))
        torch.testing.assert_close(*gradients)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returned."""

    n_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.n_elements = max(self.n_elements, result.numel())
        return result


def test_no_more_logits_exist_than_those_of_a_chunk():
    x, weight, targets = case(64, 2, 40)
    with Largest() as largest:
        linear_cross_entropy(x, weight, targets, chunk=8).backward()
    assert largest.n_elements == 8 * 40
    with Largest() as largest:
        of_all_logits(x, weight, targets)
    assert largest.n_elements == 64 * 40


def test_gradients_are_computed_where_they_are_wanted_in_the_dtype_of_the_leaf():
    x, weight, targets = case(6, 3, 5)
    with Largest() as largest, torch.no_grad():
        found = linear_cross_entropy(x, weight, targets, chunk=6)
    assert largest.n_elements == 6 * 5 and not found.requires_grad
    linear_cross_entropy(x, weight.detach(), targets).backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, torch.autograd.grad(of_all_logits(x, weight, targets), x)[0])
    loss = linear_cross_entropy(x, weight, torch.full((6,), -100))
    gradients = torch.autograd.grad(loss, (x, weight))
    assert loss.isnan() and not any(gradient.any() for gradient in gradients)
    narrow = x.detach().bfloat16().requires_grad_()
    loss = linear_cross_entropy(narrow, weight.detach().bfloat16(), targets)
    loss.backward()
    assert (loss.dtype, narrow.grad.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"targets": torch.tensor([0, 5])}, r"target 5 is neither in \[0, 5\) nor -100"),
        ({"targets": torch.tensor([0])}, r"x \(2, 3\), weight \(5, 3\) and targets \(1,\) are not"),
        ({"chunk": 0}, "chunk must be positive, got 0"),
        ({"reduction": "median"}, "reduction must be mean or sum, got 'median'"),
    ],
)
def test_each_fault_is_told(fault, message):
    good = {"x": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "targets": torch.tensor([0, 4])}
    linear_cross_entropy(**good)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(good | fault))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_given_targets_returns_their_loss(tied, monkeypatch):
    """By default of all logits; in chunks with the head's operations, gradients of a tied embedding included."""
    monkeypatch.setitem(linear_cross_entropy.__kwdefaults__, "chunk", 4)
    torch.manual_seed(0)
    config = replace(QWEN, tie_embeddings=tied)
    model = TransformerLM(config, dtype=torch.float64)
    ids = torch.randint(config.vocab_size, (2, 9))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(expected, tuple(model.parameters()))
    for ops in (REFERENCE_OPS, *(head_ops("reference", REFERENCE_OPS, chunk=chunk) for chunk in (None, 7))):
        other = TransformerLM(config, ops, dtype=torch.float64)
        other.load_state_dict(model.state_dict())
        loss = other(ids, targets)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, tuple(other.parameters())), gradients)
        assert torch.equal(other(ids), model(ids))
