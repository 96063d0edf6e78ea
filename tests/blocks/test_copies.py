"""A block copies no activation: attention reads slices of q | k | v, and writes its gradients into slices of theirs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.attention.hopper import backward as hopper_backward
from cs336_systems.attention.hopper import forward as hopper_forward
from cs336_systems.blocks import BlockGradients, BlockOps, BlockWeights, Saved, backward, block_ops, forward, merge_
from cs336_systems.blocks.fused import attention_ops
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS, kept_names
from cs336_systems.kernels.allocating import FUNCTIONS, only_allocating
from cs336_systems.model import TransformerBlock
from tests.attention.hopper.unlaunched import hopper_unlaunched

from .cases import tables

CONFIG = ModelConfig("biased", d_model=64, d_ff=96, n_layers=1, n_heads=4, n_kv_heads=2, qkv_bias=True)
HOPPER = attention_ops(hopper_forward.launch_forward, hopper_backward.launch_backward)
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten.cat.default}


class Copied(TorchDispatchMode):
    """Elements of each copy, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in FUNCTIONS and func.name() != "cs336_systems::swiglu_product_":  # which needs a GPU's driver
            with self:
                return FUNCTIONS[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in COPIES:
            self.sizes.append(result.numel())
        return result


@pytest.fixture(params=["flash", "hopper"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockOps]:
    """Launchers that do all but launch: a mode sees what they allocate and copy."""
    with only_allocating(lambda _: None), torch.device("meta"):
        if request.param == "flash":
            yield block_ops("fused", "flash")
            return
        with hopper_unlaunched(monkeypatch):
            yield replace(block_ops("fused", "hopper"), **HOPPER)


@pytest.mark.parametrize("keep", LEVELS)
def test_no_activation_is_copied(ops: BlockOps, keep: str) -> None:
    block = TransformerBlock(CONFIG, dtype=torch.bfloat16)
    merge_(block)
    parameters = {name: parameter.detach() for name, parameter in block.named_parameters()}
    grads = BlockGradients.empty(parameters, parameters)
    x, dy = torch.zeros(2, 2, 33, CONFIG.d_model, dtype=torch.bfloat16)
    how = ops, CONFIG, *tables(CONFIG, 33, torch.float32)
    saved = Saved(kept_names(keep))
    with Copied() as copied:
        weights = BlockWeights.of(parameters)
        forward(x, weights, saved, *how)
    assert copied.sizes == []
    with Copied() as copied:
        backward(dy, weights, saved, grads, *how, consume=True)
    assert copied.sizes == [CONFIG.d_model, CONFIG.d_model + 2 * CONFIG.d_kv, CONFIG.d_model]  # gains and biases
