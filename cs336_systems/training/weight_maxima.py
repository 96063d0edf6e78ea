"""Largest magnitudes of weights that are quantized, found by the optimizer as it writes them.

A weight with one scale is quantized by its largest magnitude, so it is read twice after each step: once for that, once
to be quantized. ``FusedAdamW`` has what it writes in registers, and finds the magnitude there. By arithmetic that saves
13 GB of reads in each step of a 7B model, whatever the number of its micro-batches.

The magnitudes are right of weights as the optimizer left them. Blocks compare versions (``blocks/quantized.py``): where
someone else has written since, or the optimizer could not note a weight, they read it. A captured step cannot choose;
it has those that changed found before it is replayed.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cs336_systems.blocks import BlockWeights, QuantizedProducts, WrittenOutBlock
from cs336_systems.blocks.weights import PARTS


@runtime_checkable
class NotingOptimizer(Protocol):
    """As ``FusedAdamW``."""

    noted: frozenset[Tensor]

    def note_maxima(self, parameters_of: Mapping[Tensor, Sequence[Tensor]]) -> None: ...


class WeightMaxima:
    """Of all blocks of a model whose products are quantized with one scale for each weight, and kept so.

    Args:
        optimizer: over the parameters of the blocks; is told to note.
    """

    def __init__(self, model: nn.Module, optimizer: NotingOptimizer) -> None:
        self._optimizer = optimizer
        self._blocks: list[tuple[WrittenOutBlock, QuantizedProducts, dict[str, Tensor]]] = []
        parameters_of: dict[Tensor, list[Tensor]] = {}
        for block in model.modules():
            if not (isinstance(block, WrittenOutBlock) and isinstance(products := block.products, QuantizedProducts)):
                continue
            parameters = dict(block.named_parameters())
            places = products.maxima_of_weights(parameters["ln1.weight"].device)
            if places:
                self._blocks.append((block, products, places))
                parameters_of |= {place: [parameters[part] for part in PARTS[name]] for name, place in places.items()}
        optimizer.note_maxima(parameters_of)

    def note_updated(self) -> None:
        """After the optimizer's step, and a new version of the weights."""
        for block, products, places in self._blocks:
            products.note(tuple(block.parameters()) if self._optimizer.noted.issuperset(places.values()) else ())

    @torch.no_grad()
    def find_changed(self) -> None:
        """Read the weights of blocks that have changed since the optimizer's step, so that all magnitudes are right."""
        for block, products, places in self._blocks:
            if not products.noted(tuple(block.parameters())):
                weights = BlockWeights.of(dict(block.named_parameters()))
                for name, place in places.items():
                    place.copy_(products.quantizers.absmax(getattr(weights, name)))
                products.note(tuple(block.parameters()))
