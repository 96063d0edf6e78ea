"""What quantization does to each tensor of a block, recorded on the device; results keep the same bits.

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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.blocks.autograd import WrittenOutBlock
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import Maxima, Operand, Products
from cs336_systems.blocks.quantized import Quantized, QuantizedProducts, spread

_AT_ONCE = 2**23
"""Elements, of which copies in fp32 are made."""
_ROUNDING = 1 + 2.0**-20
"""Of a scale times the format's largest, which is the largest magnitude but for two roundings of fp32."""


class WatchedProducts(Products):
    """The products of one block, and what their quantization does.

    Args:
        block: its number.
    """

    quantized = True

    def __init__(self, products: QuantizedProducts, block: int) -> None:
        self.products, self.block = products, block
        self.found: dict[str, Tensor] = {}
        """By tensor (4,) in fp64: absmax, underflows, elements cut off, elements."""
        self.reading = ""
        """The tensor that comes next."""

    def maxima(self, x: Tensor, kept: Mapping[str, Tensor] | None = None) -> Maxima:
        return _NamedMaxima(self.products.maxima(x, kept), self)

    def gradient_maxima(self, dy: Tensor) -> Maxima:
        return _NamedMaxima(self.products.gradient_maxima(dy), self)

    def read(self, x_RK: Tensor, absmax: Tensor | None, *, rows: bool = True, columns: bool = True) -> Operand:
        return self._noted(self.reading, x_RK, self.products.read(x_RK, absmax, rows=rows, columns=columns))

    def read_gradient(self, dy_RN: Tensor, absmax: Tensor | None, *, columns: bool = True) -> Operand:
        return self._noted(self.reading, dy_RN, self.products.read_gradient(dy_RN, absmax, columns=columns))

    def read_weight(self, name: str, weight_NK: Tensor, *, rows: bool = False, columns: bool = False) -> Operand:
        operand = self.products.read_weight(name, weight_NK, rows=rows, columns=columns)
        if self.products.receives:
            return operand  # of which nothing but the bytes is here
        return operand if f"{name} weight" in self.found else self._noted(f"{name} weight", weight_NK, operand)

    def at(self, parameters: Sequence[Tensor]) -> None:
        self.products.at(parameters)

    def forward_(self, ops: BlockOps, out: Tensor, x: Any, weight: Any, bias: Tensor | None = None) -> None:
        self.products.forward_(ops, out, x, weight, bias)

    def add_forward_(self, ops: BlockOps, out: Tensor, base: Tensor, x: Any, weight: Any) -> None:
        self.products.add_forward_(ops, out, base, x, weight)

    def swiglu_forward_(self, ops: BlockOps, gate_up: Tensor, x: Any, weight: Any, maxima: Maxima) -> Tensor:
        return self.products.swiglu_forward_(ops, gate_up, x, weight, maxima)

    def backward(self, ops: BlockOps, dy: Any, weight: Any) -> Tensor:
        return self.products.backward(ops, dy, weight)

    def backward_weight_(self, ops: BlockOps, gradient: Tensor, dy: Any, x: Any, accumulate: bool) -> None:
        self.products.backward_weight_(ops, gradient, dy, x, accumulate)

    def kept(self, name: str, operand: Operand) -> dict[str, Tensor]:
        return self.products.kept(name, operand)

    def recall(self, name: str, tensors: Mapping[str, Tensor]) -> Operand:
        return self.products.recall(name, tensors)

    def _noted(self, name: str, x_RK: Tensor, operand: Operand) -> Operand:
        now = _counted(x_RK, operand.rows) if operand.rows is not None else _counted(x_RK.T, operand.columns)
        before = self.found.get(name)
        if before is not None:
            now = torch.cat([torch.maximum(before[:1], now[:1]), before[1:] + now[1:]])
        self.found[name] = now
        return operand


class _NamedMaxima(Maxima):
    """Tells whose maximum was asked for: what is read next."""

    def __init__(self, maxima: Maxima, watched: WatchedProducts) -> None:
        self._maxima, self._watched = maxima, watched

    def raised(self, name: str) -> dict[str, Tensor]:
        return self._maxima.raised(name)

    def of(self, name: str, x: Tensor) -> Tensor | None:
        self._watched.reading = name
        return self._maxima.of(name, x)

    def hand_on(self, dx: Tensor) -> None:
        self._maxima.hand_on(dx)

    def steepest(self, gate_up: Tensor) -> dict[str, Tensor]:
        return self._maxima.steepest(gate_up)

    def kept(self) -> dict[str, Tensor]:
        return self._maxima.kept()


def _counted(x_RK: Tensor, quantized: Quantized) -> Tensor:
    """(4,) in fp64."""
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
