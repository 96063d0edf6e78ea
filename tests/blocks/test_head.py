"""What a model does with head and loss in chunks."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.blocks import head_ops
from cs336_systems.kernels import linear_cross_entropy
from cs336_systems.model import REFERENCE_OPS, TransformerLM

from .cases import QWEN


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_given_targets_returns_their_loss(tied, monkeypatch):
    """By default of all logits; in chunks with the head's operations, gradients of a tied embedding included."""
    monkeypatch.setattr(linear_cross_entropy, "PLAIN_CHUNK", 4)
    torch.manual_seed(0)
    config = replace(QWEN, tie_embeddings=tied)
    model = TransformerLM(config, dtype=torch.float64)
    ids = torch.randint(config.vocab_size, (2, 9))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(expected, tuple(model.parameters()))
    for ops in (REFERENCE_OPS, head_ops("reference", REFERENCE_OPS)):
        other = TransformerLM(config, ops, dtype=torch.float64)
        other.load_state_dict(model.state_dict())
        loss = other(ids, targets)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, tuple(other.parameters())), gradients)
        assert torch.equal(other(ids), model(ids))
