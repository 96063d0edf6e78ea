"""A block copies no activation: attention reads slices of q | k | v, and writes its gradients into slices of theirs."""

import pytest
import torch

from cs336_systems.blocks import BlockGradients, BlockWeights, Saved, backward, block_ops, forward, merge_
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS, kept_names
from cs336_systems.kernels.allocating import FUNCTIONS, only_allocating
from cs336_systems.model import TransformerBlock
from tests.modes import Mode

from .cases import tables

CONFIG = ModelConfig("biased", d_model=64, d_ff=96, n_layers=1, n_heads=4, n_kv_heads=2, qkv_bias=True)
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten.cat.default}


class Copied(Mode):
    """Elements of each copy, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in FUNCTIONS:
            with self:
                return FUNCTIONS[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in COPIES:
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("keep", LEVELS)
def test_no_activation_is_copied(keep: str) -> None:
    """By launchers that do all but launch: a mode sees what they allocate and copy."""
    with only_allocating(lambda _: None), torch.device("meta"):
        block = TransformerBlock(CONFIG, dtype=torch.bfloat16)
        merge_(block)
        parameters = {name: parameter.detach() for name, parameter in block.named_parameters()}
        grads = BlockGradients.empty(parameters, parameters)
        x, dy = torch.zeros(2, 2, 33, CONFIG.d_model, dtype=torch.bfloat16)
        how = block_ops("fused", "flash"), CONFIG, *tables(CONFIG, 33, torch.float32)
        saved = Saved(kept_names(keep))
        with Copied() as copied:
            weights = BlockWeights.of(parameters)
            forward(x, weights, saved, *how)
        assert copied.sizes == []
        with Copied() as copied:
            backward(dy, weights, saved, grads, *how, consume=True)
        assert copied.sizes == [CONFIG.d_model + 2 * CONFIG.d_kv, CONFIG.d_model, CONFIG.d_model]  # biases, gains
