"""A gradient that goes from block to block brings its largest magnitude along, and loses it to who changes it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import REFERENCE, write_out
from cs336_systems.blocks.maxima import FoundMaxima
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from tests.costs.test_quantizing import Counted, noting

from .test_quantized import SMALL


class Reads(Counted):
    """Whose magnitudes were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []
        noted = noting(REFERENCE.swiglu_backward_, lambda arguments, found: arguments[1])  # where the gradient now is
        self.ops = replace(self.ops, swiglu_backward_=noted)

    def absmax(self, x: Tensor) -> Tensor:
        self.read.append(x.detach().clone())
        return super().absmax(x)


def backward_of(change: Callable[[Tensor], Tensor | None] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of all parameters, and what was read for its largest magnitude in backward.

    Args:
        change: a hook on the gradient that block 1 hands to block 0.
    """
    torch.manual_seed(0)
    reads, model = Reads(), TransformerLM(SMALL, REFERENCE_OPS)
    write_out(model, reads.ops, "all", reads.products)
    if change is not None:
        model.layers[0].register_forward_hook(lambda module, inputs, output: output.register_hook(change) and None)
    ids = torch.arange(2 * 16).view(2, 16) * 7 % SMALL.vocab_size

    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    reads.read.clear()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], reads.read


def test_only_the_last_block_reads_its_gradient_for_its_magnitude(monkeypatch):
    gradients, read = backward_of()
    with monkeypatch.context() as patch:
        patch.setattr(FoundMaxima, "hand_on", lambda self, dx: None)
        expected, read_without = backward_of()
    assert (len(read), len(read_without)) == (1, SMALL.n_layers)
    assert torch.equal(read[0], read_without[0])
    assert all(map(torch.equal, gradients, expected))


def doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


def doubled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


@pytest.mark.parametrize("change", [doubled, doubled_in_place])
def test_a_gradient_that_a_hook_changes_is_read(monkeypatch, change):
    gradients, read = backward_of(change)
    with monkeypatch.context() as patch:
        patch.setattr(FoundMaxima, "hand_on", lambda self, dx: None)
        expected, read_without = backward_of(change)
    assert (len(read), len(read_without)) == (2, SMALL.n_layers)
    assert torch.equal(read[1], read_without[-1])
    assert all(map(torch.equal, gradients, expected))
