"""The first tensor that is not finite, by what is wrong with the model."""

import pytest
import torch

from cs336_systems.case import TrainingCase
from cs336_systems.pretraining.nonfinite import find_nonfinite
from cs336_systems.training import assemble
from cs336_systems.training.assemble import random_batch

CASE = TrainingCase(size="tiny", batch_size=2, context_length=16, accumulate=2)


def poison_gradient(model):
    model.layers[1].ffn.w2.weight.register_hook(lambda gradient: gradient * float("inf"))


def fill(parameter, value):
    with torch.no_grad():
        parameter.fill_(value)


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda model: None, "nothing, when it ran again"),
        (lambda model: fill(model.layers[1].ln2.weight, float("nan")), "parameter layers.1.ln2.weight"),
        (lambda model: fill(model.layers[0].attn.v_proj.weight, 3e38), "the output of layers.0.attn.v_proj"),
        (poison_gradient, "the gradient of layers.1.ffn.w2.weight"),
    ],
)
def test_what_is_wrong_is_named(harm, found):
    step = assemble(CASE)
    harm(step.model)
    assert find_nonfinite(step, *random_batch(CASE)) == found
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert not any(module._forward_hooks for module in step.model.modules())
