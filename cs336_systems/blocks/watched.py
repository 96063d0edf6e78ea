"""The effect of quantization on each tensor of a block, recorded on the device; results keep the same bits.

    with watching(model) as watched:
        step(token_ids, targets)
    for one in watched:
        one.block, one.found["normed1"]          # (4,): absmax, underflows, elements cut off, elements

Noted are what products read: activations and gradients by the names in ``quantized.py``, weights as ``qkv weight``.
An underflow is an element that is not zero and becomes zero. One is cut off if its magnitude is beyond the largest that
its scale can express, which scales of the tensor at hand rule out. Nothing waits for the device.

A tensor that is quantized again, as in another micro-batch or where it is computed again, counts again; a weight counts
once, one that arrives quantized not at all. What is noted is computed from the tensor as it was and its quantized
values, a few rows at a time, and nothing of it is left in a step that is not watched. A CUDA graph replays what it
captured, so it is of steps without one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.blocks.autograd import WrittenOutBlock
from cs336_systems.blocks.products import Maxima, Operand
from cs336_systems.blocks.quantized import Quantized, QuantizedProducts, spread

_AT_ONCE = 2**23
"""The most elements of which copies in fp32 exist at a time: 32 MiB each."""
_ROUNDING = 1 + 2.0**-20
"""Slack of a scale times the format's largest number, which is the largest magnitude but for two roundings of fp32."""


class WatchedProducts(QuantizedProducts):
    """The products of one block, which note what their quantization does; norms and gradients are stored to be seen.

    Args:
        block: the block's number.
    """

    def __init__(self, products: QuantizedProducts, block: int) -> None:
        super().__init__(products.recipe, replace(products.quantizers, fused=None), products.remember)
        self.arrived, self.block = products.arrived, block
        self.found: dict[str, Tensor] = {}
        """Absmax, underflows, elements cut off and elements, (4,) in fp64, by tensor."""

    def read(self, name: str, x_RK: Any, maxima: Maxima, *, rows: bool = True, columns: bool = True) -> Operand:
        return self._noted_as(name, x_RK, super().read(name, x_RK, maxima, rows=rows, columns=columns))

    def read_gradient(self, name: str, dy_RN: Tensor, maxima: Maxima, *, columns: bool = True) -> Operand:
        return self._noted_as(name, dy_RN, super().read_gradient(name, dy_RN, maxima, columns=columns))

    def read_weight(self, name: str, weight_NK: Tensor, *, rows: bool = False, columns: bool = False) -> Operand:
        operand = super().read_weight(name, weight_NK, rows=rows, columns=columns)
        if self.arrived is not None or f"{name} weight" in self.found:  # of what arrives only the bytes are here
            return operand
        return self._noted_as(f"{name} weight", weight_NK, operand)

    def _noted_as(self, name: str, x_RK: Tensor, operand: Operand) -> Operand:
        now = _counted(x_RK, operand.rows) if operand.rows is not None else _counted(x_RK.T, operand.columns)
        before = self.found.get(name)
        if before is not None:
            now = torch.cat([torch.maximum(before[:1], now[:1]), before[1:] + now[1:]])
        self.found[name] = now
        return operand


def _counted(x_RK: Tensor, quantized: Quantized) -> Tensor:
    """Absmax, underflows, elements cut off and elements of x, (4,) in fp64."""
    width = x_RK.shape[1]
    n_rows = max(1, _AT_ONCE // width)
    parts = []
    for start in range(0, x_RK.shape[0], n_rows):
        some = slice(start, start + n_rows)
        x, values, scale = x_RK[some].float().abs(), quantized.values[some].float(), quantized.scale
        if scale.dim() == 2:
            scale = scale[some]
        if scale.dim() == 2 and scale.shape[1] > 1:
            scale = spread(scale, width)
        zeroed, cut_off = (values == 0) & (x != 0), x > scale * (torch.finfo(quantized.values.dtype).max * _ROUNDING)
        parts.append(torch.stack([x.amax().double(), zeroed.sum().double(), cut_off.sum().double()]))
    absmax, *counts = torch.stack(parts).unbind(1)
    return torch.stack([absmax.amax(), *(count.sum() for count in counts), absmax.new_full((), x_RK.numel())])


@contextmanager
def watching(model: nn.Module) -> Iterator[list[WatchedProducts]]:
    """Watch the quantized products of the model's written-out blocks; weights are quantized anew, so as to be seen."""
    blocks = [module for module in model.modules() if isinstance(module, WrittenOutBlock)]
    watched = [
        (block, products, WatchedProducts(products, i))
        for i, block in enumerate(blocks)
        if isinstance(products := block.products, QuantizedProducts)
    ]
    try:
        for block, products, watch in watched:
            products.at(())
            block.products = watch
        yield [watch for *_, watch in watched]
    finally:
        for block, products, _ in watched:
            block.products = products
