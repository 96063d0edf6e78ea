"""Inputs of blocks in host memory: the same gradients, memory that is used again, and none where nothing is kept."""

import copy
import pickle

import pytest
import torch

from cs336_systems.blocks.host_inputs import HostInputs

from .cases import IDS, QWEN, loss_of, written_out_model


def gradients(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("keep", ["input", "all"])
def test_gradients_are_the_same_bits(keep):
    pair = [written_out_model(QWEN, keep, on_host=away) for away in (False, True)]
    for retain_graph in (False, True):
        losses = [loss_of(model) for model in pair]
        for loss in losses:
            loss.backward(retain_graph=retain_graph)
            if retain_graph:  # which serves again
                loss.backward()
        assert torch.equal(*losses)
        assert all(map(torch.equal, *(gradients(model) for model in pair)))


def test_host_memory_is_that_of_the_open_passes():
    model = written_out_model(QWEN, "input", on_host=True)
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
    model = written_out_model(QWEN, "input", on_host=True)
    loss_of(model).backward()
    twin, block = copy.deepcopy(model), pickle.loads(pickle.dumps(model.layers[0]))
    assert twin.layers[0].host_inputs is twin.layers[1].host_inputs
    for inputs in (twin.layers[0].host_inputs, block.host_inputs):
        assert isinstance(inputs, HostInputs)
        assert inputs is not model.layers[0].host_inputs
        assert inputs.n_blocks == 2
