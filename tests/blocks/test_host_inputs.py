"""Inputs of blocks in host memory: the same gradients, memory that is used again, and none where nothing is kept."""

import copy
import pickle

import pytest
import torch
from torch import nn

from cs336_systems.blocks import REFERENCE, write_out
from cs336_systems.blocks.host_inputs import HostInputs
from cs336_systems.model import TransformerLM

from .cases import QWEN

IDS = torch.arange(4 * 9).view(4, 9) * 7 % 50


def model_of(keep="input", *, inputs_on_host) -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(QWEN)
    write_out(model, REFERENCE, keep, inputs_on_host=inputs_on_host)
    return model


def loss_of(model, ids=IDS) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def gradients(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("keep", ["input", "all"])
def test_gradients_are_the_same_bits(keep):
    pair = [model_of(keep, inputs_on_host=away) for away in (False, True)]
    for retain_graph in (False, True):
        losses = [loss_of(model) for model in pair]
        for loss in losses:
            loss.backward(retain_graph=retain_graph)
            if retain_graph:  # which serves again
                loss.backward()
        assert torch.equal(*losses)
        assert all(map(torch.equal, *(gradients(model) for model in pair)))


def test_host_memory_is_that_of_the_open_passes():
    model = model_of(inputs_on_host=True)
    inputs = model.layers[0].host_inputs
    assert inputs is model.layers[1].host_inputs

    def free() -> list[int]:
        return [len(hosts) for hosts in inputs._free.values()]

    first, second = loss_of(model), loss_of(model)
    assert free() == [0]
    first.backward()
    assert free() == [2]
    second.backward()
    del first, second
    assert free() == [4]
    with torch.no_grad():
        loss_of(model)
    loss_of(model)  # whose graph is dropped
    loss_of(model).backward()
    assert free() == [4]
    loss_of(model, IDS[:2]).backward()
    assert free() == [4, 2]


def test_a_copied_or_pickled_model_has_memory_of_its_own():
    model = model_of(inputs_on_host=True)
    loss_of(model).backward()
    twin, block = copy.deepcopy(model), pickle.loads(pickle.dumps(model.layers[0]))
    assert twin.layers[0].host_inputs is twin.layers[1].host_inputs
    for inputs in (twin.layers[0].host_inputs, block.host_inputs):
        assert isinstance(inputs, HostInputs)
        assert inputs is not model.layers[0].host_inputs
        assert inputs.n_blocks == 2
