"""Parameters in one memory: seen merged without a copy, and otherwise what they were."""

import copy
import pickle

import pytest
import torch

from cs336_systems.blocks import REFERENCE, BlockWeights, WrittenOutBlock, merge_, write_out
from cs336_systems.blocks.weights import PARTS, merged
from cs336_systems.model import TransformerBlock, TransformerLM
from cs336_systems.model.hf_weights import load_hf_weights, save_hf_weights

from .cases import CONFIGS, QWEN, written_out_model


def is_merged(block: TransformerBlock) -> bool:
    """Whether the weights alias the parameters, so that nothing is copied while the block runs."""
    parameters = dict(block.named_parameters())
    weights = BlockWeights.of(parameters)
    return all(
        getattr(weights, name).data_ptr() == parameters[parts[0]].data_ptr()
        for name, parts in PARTS.items()
        if parts[0] in parameters
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_merging_keeps_names_objects_and_values(config):
    block = TransformerBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in block.named_parameters()}
    assert not is_merged(block)
    copied = BlockWeights.of(dict(block.named_parameters()))
    merge_(block)
    assert is_merged(block)
    weights = BlockWeights.of(dict(block.named_parameters()))
    assert (weights.qkv_bias is not None) == config.qkv_bias
    assert {part for parts in PARTS.values() for part in parts} >= before.keys()
    for name in PARTS:
        if getattr(weights, name) is not None:
            assert torch.equal(getattr(weights, name), getattr(copied, name)), name
    for name, parameter in block.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.is_contiguous()
    place = weights.gate_up.data_ptr()
    merge_(block)  # again: nothing moves
    assert BlockWeights.of(dict(block.named_parameters())).gate_up.data_ptr() == place


def test_only_rows_that_follow_each_other_are_seen_as_one():
    memory = torch.arange(24.0).view(8, 3)
    for first, second in (
        (memory[:2], memory[2:5]),
        (memory[2:4], memory[4:]),
        (memory[:2], memory[3:5]),  # a gap
        (memory[2:4], memory[:2]),  # the other order
        (memory[:2], memory[1:3]),  # overlap
        (memory[:2], memory.clone()[2:4]),
        (memory[:2, :2], memory[2:4, :2]),  # rows with something in between
    ):
        whole = merged([first, second])
        assert torch.equal(whole, torch.cat([first, second]))
        follows = second.data_ptr() == first.data_ptr() + 4 * first.numel() and first.is_contiguous()
        assert (whole.data_ptr() == first.data_ptr()) == follows


def test_blocks_stay_merged_through_moves_copies_and_loads(tmp_path):
    reference = TransformerLM(QWEN)
    model = copy.deepcopy(reference)
    parameters = dict(model.named_parameters())
    write_out(model, REFERENCE, "products")
    assert {name: parameters[name] is parameter for name, parameter in model.named_parameters()} == dict.fromkeys(
        parameters, True
    )
    shell = written_out_model(QWEN, device="meta").to_empty(device="cpu")
    shell.load_state_dict(reference.state_dict())
    shell.rotary.reset_parameters()
    save_hf_weights(model, tmp_path)
    loaded = written_out_model(QWEN)
    load_hf_weights(loaded, tmp_path)
    pickled = pickle.loads(pickle.dumps(model))
    for each in (model, copy.deepcopy(model), pickled, shell, loaded, copy.deepcopy(model).double().float()):
        assert all(isinstance(block, WrittenOutBlock) and is_merged(block) for block in each.layers)
        assert each.state_dict().keys() == reference.state_dict().keys()
        for name, value in reference.state_dict().items():
            assert torch.equal(each.state_dict()[name], value), name
