"""torchao's float8 in place of torch's linear layers, by its own recipes: the peer of products in fp8.

    with_float8(block, "tensorwise")    # one scale for a tensor, gradients in e5m2
    with_float8(block, "rowwise")       # a scale for a row, all in e4m3

Its layers quantize activations, gradients and, in every pass, weights; they are meant to be compiled, which fuses that
with what stands around. On a CPU they emulate products, as ours do. torchao is imported when it is asked for.
"""

from dataclasses import replace

from torch import nn

from cs336_systems.experiments.kernels.peers import installed


def with_float8(module: nn.Module, recipe: str) -> nn.Module:
    """The module with torchao's layers, which hold the same parameters; those inside it are replaced in place.

    Args:
        module: its dtype is bf16 on a GPU.
        recipe: of torchao's: tensorwise or rowwise.

    Raises:
        Unsupported: torchao is not installed.
    """
    float8 = installed("torchao.float8", "torchao")
    emulate = next(module.parameters()).device.type == "cpu"
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    converted: nn.Module = float8.convert_to_float8_training(module, config=config)
    return converted
